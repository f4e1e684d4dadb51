"""What ``torch.compile`` makes of a step: fewer kernels, which go through memory less often.

Eagerly each pass over tensors is a kernel: it reads from memory what the last one has written
there. Inductor makes one kernel of passes that follow each other, and what they hand on stays in
registers::

    eager      x -> [cast] -> a -> [square] -> b -> [mean] -> c ...     each arrow is memory
    compiled   x -> [cast, square, mean, ...] -> out

Here operators still come one by one, and each is charged as the kernel that it has become a part
of:

- It reads what no other part of that has read or made.
- What it makes is written when that kernel ends, unless another part has read it. If another kernel
  reads it then, in the same pass through the model, it was written after all, and is charged now.
  (In the backward it is computed again, as the min-cut partitioner of AOTAutograd has it.)
- The host launches the first part only.

A kernel ends where something else begins: a product, attention, or work of FSDP, whose hooks cut
the graph. Attention and products are the same kernels as before.

Source: Ansel et al., "PyTorch 2", ASPLOS 2024, section 4 (TorchInductor).
"""

from collections.abc import Iterable

from minifsdp.sim.calls import Call
from minifsdp.sim.hardware.costs import Cluster, Cost
from minifsdp.sim.hardware.kernels import PASS, kernel_of
from minifsdp.sim.tape import Buffer

Sized = Iterable[tuple[Buffer, int]]
"""Memory, and how many bytes of it are read or written."""


class Fusion:
    """Charges the operators of one pass through a compiled model, forward or backward, in order.

    Args:
        cluster: whose GPU it is.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._here: set[Buffer] = set()  # what the kernel that is open has read or made
        self._made: dict[Buffer, int] = {}  # of it, what is to be written when it ends
        self._spared: dict[Buffer, int] = {}  # what kernels have not written
        self._owed = 0  # bytes that were written, and are not charged yet

    def end(self) -> None:
        """The kernel that is open ends."""
        self._owed += sum(self._made.values())
        self._made.clear()
        self._here.clear()

    def cost(self, call: Call, reads: Sized, writes: Sized) -> tuple[Cost, bool]:
        """Of an operator on the compute stream, and whether the host has to launch it."""
        kernel = kernel_of(call)
        if kernel.kind != PASS:
            self.end()
        begins = not self._here
        moved, self._owed = self._owed, 0
        for buffer, size in reads:
            if buffer in self._here:
                if buffer in self._made:
                    self._spared[buffer] = self._made.pop(buffer)
            else:
                moved += self._spared.pop(buffer, 0)
                if kernel.kind == PASS:
                    moved += size
                    self._here.add(buffer)
        gpu = self._cluster.gpu
        seconds = moved / (gpu.bandwidth * gpu.passes)
        if kernel.kind != PASS:
            return Cost(seconds + self._cluster.kernel_seconds(kernel), kernel.flops), True
        for buffer, size in writes:
            self._here.add(buffer)
            self._made[buffer] = size
        return Cost(max(seconds, self._cluster.kernel * begins)), begins
