"""fingerprint.py: equal values have equal numbers, wherever they are; others have others."""

import pytest
import torch

from minifsdp.support.fingerprint import fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("numel", [0, 1, 3, 7, 64, 1001])
def test_a_fingerprint_depends_on_all_bits_and_on_nothing_else(numel, dtype):
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel + 1, generator=generator).to(dtype)
    number = fingerprint([values[1:]])
    assert number == fingerprint([values[1:].clone()])  # that begins elsewhere in memory
    for place in range(min(numel, 9)):
        other = values[1:].clone()
        other[place] += 1
        assert fingerprint([other]) != number
    assert fingerprint([values, values + 1]) != fingerprint([values + 1, values])
    assert fingerprint([values.to("meta")]) is None
    apart = torch.stack([values, values + 1], 1)[:, 0]
    assert fingerprint([apart]) == fingerprint([values])
