"""sim/hardware/kernels.py: what operators are, as work."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional

from minifsdp.sim import cluster
from minifsdp.sim.hardware.kernels import ATTENTION, ATTENTION_BACKWARD, PASS, PRODUCT, kernel_of
from minifsdp.sim.training.wrapped import tf32


def kernels_of(work) -> list:
    """Of all operators that a function calls on a virtual GPU."""
    found = []

    def noted(call):
        found.append((call.name, kernel_of(call)))
        return found[-1][1]

    with cluster(), patch("minifsdp.sim.hardware.costs.kernel_of", noted):
        work()
    return found


def test_a_product_has_its_shape_and_torchs_own_count():
    a, b = (torch.empty(size, device="meta", dtype=torch.bfloat16) for size in ((2, 3), (3, 5)))
    ((name, product), *_) = kernels_of(lambda: a @ b)
    assert (name, product.kind, product.shape) == ("mm", PRODUCT, (1, 2, 5, 3))
    assert product.flops == product.done == 2 * 2 * 3 * 5
    assert product.low and product.moved == 2 * (2 * 3 + 3 * 5 + 2 * 5)


def test_products_with_a_bias_of_batches_and_of_transposed_factors():
    def shapes(work):
        return [k.shape for _, k in kernels_of(work) if k.kind == PRODUCT]

    layer = nn.Linear(8, 6, device="meta")
    x = torch.empty(4, 3, 8, device="meta", requires_grad=True)
    forward, *backward = shapes(lambda: layer(x).sum().backward())
    assert forward == (1, 12, 6, 8)
    assert sorted(backward) == [(1, 6, 8, 12), (1, 12, 8, 6)]
    assert shapes(lambda: x @ x.mT) == [(4, 3, 3, 8)]


@pytest.mark.parametrize(
    "groups, shape",
    [(1, (1, 2 * 2 * 2, 8, 4 * 16 * 16)), (4, (4, 2 * 2 * 2, 2, 16 * 16))],
)
def test_a_convolution_is_a_product_of_unfolded_pictures(groups, shape):
    pictures = torch.empty(2, 4, 32, 32, device="meta", requires_grad=True)
    patches = nn.Conv2d(4, 8, 16, 16, groups=groups, device="meta")
    found = [k for _, k in kernels_of(lambda: patches(pictures).sum().backward())]
    forward, backward = [k for k in found if k.kind == PRODUCT]
    assert forward.shape == backward.shape == shape
    products, rows, columns, inner = shape
    assert forward.flops == 2 * products * rows * columns * inner == backward.flops / 2


def test_all_else_is_a_pass_over_its_tensors():
    a = torch.empty(2, 3, device="meta")
    ((name, kernel),) = kernels_of(lambda: a + a)
    assert (name, kernel.kind, kernel.flops) == ("add", PASS, 0)
    assert kernel.moved == 3 * 24 and not kernel.low


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", ["flash", "efficient"])
def test_attention_is_counted_in_full_and_done_by_half_if_it_is_causal(which, causal):
    q, k, v = (
        torch.empty(2, 4, 64, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    mask = None if which == "flash" else torch.empty(64, 64, device="meta", dtype=torch.bfloat16)

    def work():
        functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).sum().backward()

    product = 2 * 2 * 4 * 64 * 64 * 8
    found = {name: kernel for name, kernel in kernels_of(work) if "attention" in name}
    assert list(found) == [
        f"_scaled_dot_product_{which}_attention",
        f"_scaled_dot_product_{which}_attention_backward",
    ]
    forward, backward = found.values()
    assert (forward.kind, backward.kind) == (ATTENTION, ATTENTION_BACKWARD)
    assert forward.shape == backward.shape == (8, 64, 64, 8)
    assert (forward.flops, backward.flops) == (2 * product, 4 * product)
    done = (2 * product, 5 * product)
    assert (forward.done, backward.done) == tuple(d / (2 if causal else 1) for d in done)


def test_tf32_is_used_where_torch_would_use_it():
    """For products if it is switched on, and for convolutions if it is not switched off."""
    x, y = (torch.empty(4, 4, device="meta") for _ in range(2))
    image, weight = torch.empty(1, 2, 8, 8, device="meta"), torch.empty(3, 2, 3, 3, device="meta")

    def found():
        product, convolution = kernels_of(lambda: (x @ y, functional.conv2d(image, weight)))
        return product[1].tf32, convolution[1].tf32

    assert found() == (False, True)
    with tf32("tf32"), torch.backends.cudnn.flags(allow_tf32=False):
        assert found() == (True, False)
