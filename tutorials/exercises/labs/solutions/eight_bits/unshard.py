"""Gathers in 8 bits, in blocks with a scale of their own."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from minifsdp.core.streams import Finish, Streams
from minifsdp.core.unit import Unit

BLOCK = 32


def quantize(chunk: Tensor) -> Tensor:
    """``chunk``, ``[n]``, as bytes: the integers of all blocks, then the scales in bfloat16."""
    blocks = pad(chunk, (0, -chunk.numel() % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    # A scale that was rounded down would need integers beyond 127 for the largest value.
    integers = (blocks / scales.float().clamp(min=1e-30)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([integers.view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()])


def dequantize(sent: Tensor, chunk: Tensor) -> None:
    """Write what ``quantize`` made into ``chunk``, ``[n]``."""
    integers = sent[: -(-chunk.numel() // BLOCK) * BLOCK]
    scales = sent[integers.numel() :].clone().view(torch.bfloat16)
    values = integers.view(torch.int8).view(-1, BLOCK).float() * scales.float()[:, None]
    chunk.copy_(values.flatten()[: chunk.numel()])


def unshard(unit: Unit, streams: Streams) -> None:
    """Start to fill ``unit.unsharded.flat_param``; offload is left out."""
    unit.state.start_unshard()
    group = unit.shard_group

    def launch() -> Finish:
        unit.unsharded.allocate()
        data = unit.unsharded.data
        if group is None:
            data.copy_(unit.padded_shard)
            return lambda: None
        sent = quantize(unit.padded_shard)
        received = sent.new_empty(group.size() * sent.numel())
        arrive = unit.comm.all_gather(unit, received, sent, group)

        def finish() -> None:
            arrive()
            # Of this rank's own chunk, too: all ranks have to compute with the same parameters.
            pairs = zip(received.chunk(group.size()), data.chunk(group.size()), strict=True)
            for packed, chunk in pairs:
                dequantize(packed, chunk)

        return finish

    unit.unshard_event = streams.unshard.submit(launch, f"all-gather {unit.label}")
