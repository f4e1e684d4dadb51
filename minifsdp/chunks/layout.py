"""What features ask of the layout of a unit in chunks, beyond what the core does (core/shard.py).

Rows have different blocks and may be frozen in part (rows.py), and they answer the same questions.
For chunks the answers are simple.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minifsdp.core.flatten import unflatten
from minifsdp.core.shard import Chunks


class FeaturedChunks(Chunks):
    """The chunks of a unit.

    Attributes:
        blocks, trained_blocks: None, which is one block for each rank; see comm/blocks.py.
        trained_numel: elements of the unsharded flat parameter that can have a gradient: all.
        sizes: of the parameters in it, and of the padding.
    """

    blocks = trained_blocks = None

    def __init__(self, shapes: Sequence[torch.Size], world_size: int) -> None:
        super().__init__(shapes, world_size)
        self.trained_numel = self.padded_numel
        self.sizes = [*(shape.numel() for shape in shapes), self.padded_numel - self.numel]

    def unflatten(self, flat: Tensor, frozen: Tensor | None = None) -> list[Tensor]:
        """See :class:`~minifsdp.core.shard.Chunks`. ``frozen`` is None: a unit is frozen as a whole
        or not at all."""
        return unflatten(flat, self.shapes)

    def local_tensors(self, shard: Tensor, rank: int) -> list[Tensor]:
        """What an optimizer sees of a shard without padding: all of it, as one tensor."""
        return [shard]
