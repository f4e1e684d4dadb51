"""SGD in hooks of the sharded flat parameters on a virtual GPU, and Adam on two ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tutorials.exercises import observe
from tutorials.exercises.catalog import Check
from tutorials.exercises.labs.measure import because, figure, on_gpu


def step_in_hooks(model: Any, make: Callable[[list[Any]], torch.optim.Optimizer]) -> None:
    """Give each parameter an optimizer of its own, which steps when its gradient is there."""
    for parameter in model.parameters():
        optimizer = make([parameter])

        def hook(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)


def on_a_gpu() -> Iterator[Any]:
    """Two GPUs, so that half of all gradients are here: the default keeps them till the end."""
    from minifsdp import FullyShardedDataParallel, ModuleWrapPolicy
    from minifsdp.sim import cluster
    from tutorials.exercises.virtual import Block

    with cluster(gpu="a100-40", nodes=2, gpus_per_node=1) as gpu:
        blocks = torch.nn.Sequential(*(Block(2048) for _ in range(12)))
        model = FullyShardedDataParallel(blocks, auto_wrap_policy=ModuleWrapPolicy({Block}))
        step_in_hooks(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for _ in range(3):
            model(torch.empty(256, 2048)).mean().backward()
            gpu.step()
    yield from on_gpu(gpu)
    yield figure(gpu.report()["peak allocated"] / 2**20)


def on_two_ranks() -> Iterator[Any]:
    """Losses and parameters are those of DDP with an ordinary optimizer."""
    from minifsdp import FullyShardedDataParallel, ModuleWrapPolicy
    from tutorials.exercises import parallel

    model: Any = parallel.small_model()
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
    if observe.reference:
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = adam(model.parameters())
    else:
        policy = ModuleWrapPolicy({parallel.Block})
        model, optimizer = FullyShardedDataParallel(model, auto_wrap_policy=policy), None
        step_in_hooks(model, adam)
    for step in range(4):
        yield f"loss of step {step + 1}", parallel.one_backward(model, step)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        yield f"parameter {name.removeprefix('module.')} at the end", value


CHECKS = [Check(on_a_gpu, 1, 20, because), Check(on_two_ranks, 2, 20, because)]
