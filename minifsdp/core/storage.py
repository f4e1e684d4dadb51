"""The unsharded flat parameter: a tensor whose memory is allocated and freed in every step.

The layers compute with views of this tensor, and the gradients of the views arrive at it. The views
share its *storage*. So the tensor stays for good, and its storage is resized::

    SHARDED      flat_param [padded_numel], storage of 0 bytes        views without values
    UNSHARDED    the same tensor, storage of all bytes, gathered      the same views, with values

A new tensor for every gather would leave the views without memory, and autograd with a graph that
ends at an old tensor.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node


@dataclass(eq=False, repr=False)  # to print tensors whose memory is freed ends the process
class UnshardedFlatParam:
    """The shards of all ranks, in rank order.

    Attributes:
        flat_param: ``[padded_numel]``, a leaf of the graph. The layers compute with views of it.
        data: the same memory with a version counter of its own. Collectives write here: through
            ``flat_param`` they would look to autograd like an in-place change of what the forward
            has saved.
        needs_unshard: its memory is allocated and freed. False: it has the memory of the shard,
            which is the whole parameter (NO_SHARD).
        grad_accumulator: autograd's node that a backward comes to last in this unit; None if the
            unit is frozen.
    """

    flat_param: Tensor
    data: Tensor
    needs_unshard: bool
    grad_accumulator: Node | None

    def __post_init__(self) -> None:
        self.storage = self.data.untyped_storage()
        self.dtype = self.data.dtype
        self.nbytes = self.data.numel() * self.data.itemsize

    def allocate(self) -> None:
        """Get memory for the shards of all ranks. It has no values yet."""
        self.storage.resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory back. The tensors stay."""
        self.storage.resize_(0)
