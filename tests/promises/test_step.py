"""Promises inside the step: what a module may do in its forward, and a loss with its outputs."""

import pytest
import torch
from torch import nn

from tests.promises import Block, same, train
from tests.ranks import on_ranks


class Flat(Block):
    """Its output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(torch.tanh(x)).reshape(3, 2, 3).flatten(1)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Flat() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


def a_view_that_its_caller_changes_in_place(wrap):
    return train(wrap(InPlace()), lambda model, x: model(x).pow(2).sum())


RIGHT = [a_view_that_its_caller_changes_in_place]


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
@on_ranks(2)
def test_right(program):
    same(program)
