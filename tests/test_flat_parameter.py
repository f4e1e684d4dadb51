"""flat_parameter.py: who may have the gradient of a chunk, and who is told of optimizers."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from minifsdp import FlatParameter


def flat_parameter(is_chunk: bool) -> FlatParameter:
    param = FlatParameter(torch.ones(3))
    param.is_chunk = is_chunk
    param.grad = torch.full((3,), 2.0)
    return param


def test_the_gradient_of_a_flat_parameter_is_that_of_any_other():
    param = flat_parameter(is_chunk=True)
    (param * 3).sum().backward()
    assert torch.equal(param.grad, torch.full((3,), 5.0))
    del param.grad
    assert param.grad is None
    with pytest.raises(RuntimeError, match="size"):
        param.grad = torch.ones(4)


@pytest.mark.parametrize("foreach", [True, False, None])
def test_torchs_clip_grad_norm_does_not_get_the_gradient_of_a_chunk(foreach):
    param = flat_parameter(is_chunk=True)
    for given in (param, [torch.nn.Parameter(torch.ones(1)), param], iter([param])):
        with pytest.raises(RuntimeError, match=r"It would see this rank's chunks only"):
            clip_grad_norm_(given, 1.0, foreach=foreach)
    whole = flat_parameter(is_chunk=False)
    clip_grad_norm_(whole, 1.0, foreach=foreach)
    assert whole.grad.norm() < 1.001


def test_others_do():
    param = flat_parameter(is_chunk=True)
    clip_grad_value_(param, 1.5)
    assert torch.equal(param.grad, torch.full((3,), 1.5))

    def clip_grad_norm_(params):  # a user's own, who may know what to do
        return [p.grad for p in params]

    assert clip_grad_norm_([param]) == [param.grad]
    torch.optim.SGD([param], lr=1.0).step()
    assert torch.equal(param.detach(), torch.full((3,), -0.5))
