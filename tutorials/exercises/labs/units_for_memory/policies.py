"""Lab: a policy that chooses units for a given memory.

Many small units mean many small messages; a large unit takes much memory. The model is crooked: it
has stages, the blocks of a stage come in pairs, and the stages differ in width. A unit may be a
stage, a pair or a block.

Measured: the time of a training step on a virtual GPU, added up over three sizes of memory: what a
unit for each block takes, 10 % more and 30 % more. Less is better.
Rules: each choice fits into its memory. At most 25 different choices are tried out, for all three
sizes together.
"""

from collections.abc import Callable
from typing import Any

TryOut = Callable[[set[str]], Any]


def choose_units(sizes: dict[str, int], memory: int, try_out: TryOut) -> set[str]:
    """The names of the modules that become units.

    Args:
        sizes: bytes of the parameters of each stage, pair and block, by names such as "stage512",
            "stage512.0" and "stage512.0.1". What is in no unit is in the root's.
        memory: bytes that a training step may reserve.
        try_out: trains with some units on the virtual GPU; returns ``seconds`` of a step and
            ``memory``, the bytes that it has reserved.
    """
    return {name for name in sizes if not any(other.startswith(f"{name}.") for other in sizes)}
