"""pretended_gpu.py: what it allows and what it refuses is what CUDA does."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pretended_gpu import GPU, PretendedGpu
from tests.ranks import on_ranks


def test_what_is_computed_is_where_its_operands_are():
    with PretendedGpu():
        x = torch.ones(2, 3, device="cuda")
        assert x.device == GPU and x.is_cuda and not x.is_cpu
        for made in (x + x, x.view(-1), x.new_zeros(2), torch.zeros_like(x), x[0], x.half(), x * 2):
            assert made.device == GPU
        for made in (torch.ones(2), x.cpu(), x.to("cpu"), x.new_zeros(2, device="cpu")):
            assert made.device.type == "cpu"
        assert torch.ones(2).to(x).device == torch.ones(2).type_as(x).device == GPU
        assert torch.empty(2, device="meta").is_meta
        assert copy.deepcopy(x).device == GPU


def test_it_crosses_by_copies_which_share_no_memory():
    with PretendedGpu():
        host = torch.ones(3)
        there = host.to("cuda")
        there.mul_(2)
        assert host.tolist() == [1, 1, 1] and there.tolist() == [2, 2, 2]
        assert there.to("cuda") is there, "it is there already"
        host.copy_(there)
        assert host.device.type == "cpu" and host.tolist() == [2, 2, 2]


@pytest.mark.parametrize("compute", [torch.add, torch.equal, torch.dot, torch.maximum])
def test_nothing_is_computed_of_both(compute):
    with PretendedGpu():
        host, there = torch.ones(3), torch.ones(3, device="cuda")
        for operands in ((host, there), (there, host)):
            with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
                compute(*operands)
        assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2], "but a number may be on the host"


def test_autograd_goes_on_there():
    seen = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    with PretendedGpu():
        model.to("cuda")
        x = torch.ones(2, 3, device="cuda", requires_grad=True)
        x.register_hook(lambda grad: seen.append(grad.device))
        first, _ = torch.split(model[0](x), [1, 2], 1)
        (first.sum() + model(x).sum()).backward()  # autograd makes zeros for the second part
        assert seen == [GPU] and model[0].weight.grad.device == GPU


def test_functions_that_are_written_in_python_make_tensors_there():
    with PretendedGpu():
        x = torch.ones(2, 3, device="cuda")
        hooks = []

        def pack(tensor):
            hooks.append(tensor.device)  # autograd calls it in the middle of a function
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            nn.functional.linear(x.requires_grad_(), torch.ones(4, 3, device="cuda"))
        assert hooks and {*hooks} == {GPU}
        heads = nn.MultiheadAttention(4, 2, batch_first=True).to("cuda")
        query = torch.ones(1, 3, 4, device="cuda")
        assert heads(query, query, query)[0].device == GPU


def test_files_say_what_was_there(tmp_path):
    with PretendedGpu():
        torch.save([torch.ones(2, device="cuda"), torch.zeros(2)], tmp_path / "both")
        there, host = torch.load(tmp_path / "both")
        assert there.device == GPU and there.tolist() == [1, 1] and host.device.type == "cpu"
        there, host = torch.load(tmp_path / "both", map_location="cuda")
        assert there.device == host.device == GPU
        there, host = torch.load(tmp_path / "both", map_location="cpu")
        assert there.device.type == host.device.type == "cpu"
        assert (there + host).tolist() == [1, 1]


@on_ranks(2, pretended_gpu=True)
def test_groups_carry_what_is_there_alone_and_say_so():
    assert dist.get_backend_config() == "cuda:nccl"
    assert dist.get_backend_config(dist.new_group(backend="gloo")) == "cpu:gloo,cuda:gloo"
    there = torch.ones(2, device="cuda")
    dist.all_reduce(there)
    assert there.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))


def test_it_notes_what_the_host_waits_for():
    with PretendedGpu() as gpu:
        x, host = torch.arange(3.0, device="cuda"), torch.arange(3.0)
        host[[1, 2]], bool(host.any()), x.sum(), x[1], x.view(3).add_(1), host.tolist(), x.to(x)
        host.to("cuda", non_blocking=True), x.copy_(host, non_blocking=True), x.copy_(x)
        assert gpu.waits == []
        for wait in (
            lambda: bool(x.any()),
            lambda: x.tolist(),
            lambda: x[1].item(),
            lambda: torch.equal(x, x),
            lambda: x[[1, 2]],
            lambda: x.nonzero(),
            lambda: x.cpu(),
            lambda: x.copy_(host),
            lambda: host.copy_(x),
            lambda: torch.tensor([1.0], device="cuda"),
        ):
            before = len(gpu.waits)
            wait()
            assert len(gpu.waits) == before + 1, gpu.waits
    assert torch.ones(1).device.type == "cpu"
