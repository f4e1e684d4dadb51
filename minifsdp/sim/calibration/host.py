"""Samples of what the host takes: to ask for a kernel, to move its own memory."""

import torch
from torch import nn

from minifsdp.core.collectives import Group
from minifsdp.sim.calibration.kernels import kernels_of
from minifsdp.sim.calibration.timing import seconds
from minifsdp.sim.training.models import Block

LAYERS, WIDTH = 8, 16


def launch(device: torch.device, group: Group) -> float:
    """Seconds for each kernel: those of a training step whose kernels have next to nothing to do,
    shared out among them. So it has a share of what modules, autograd and the optimizer take."""
    blocks = (Block(WIDTH, 2, 4 * WIDTH, True, False) for _ in range(LAYERS))
    model = nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.ones(1, WIDTH, WIDTH, device=device)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's states
    return seconds(step, device, group) / len(kernels_of(step))


def bandwidth(group: Group) -> float:
    """Bytes per second that the host reads and writes in its own memory, of one process."""
    x = torch.ones(2**24)
    return 2 * x.nbytes / seconds(lambda: x.add_(1), x.device, group)
