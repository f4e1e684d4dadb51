"""Who takes part in `make bench`: minifsdp in its layouts and strategies, and PyTorch's own.

Each makes a model that trains; the settings are those that its users would choose. Models compute
on CPUs in fp32, on GPUs in fp32 or bf16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy as TheirPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

import minifsdp
from minifsdp.comm import same_machine
from tests.bench.alone import MessagesAlone
from tutorials.train_gpt import Block


@dataclass(frozen=True)
class Setting:
    """What all contenders are given.

    Attributes:
        bf16: parameters and gradients are sent, and used, in 16 bits.
        offload: shards are in the host's memory.
        blocks: classes of the modules that are units, where a contender has no others of its own.
    """

    device: torch.device
    bf16: bool = False
    offload: bool = False
    blocks: tuple[type[nn.Module], ...] = (Block,)


Wrap = Callable[[nn.Module, Setting], nn.Module]


def _local(model: nn.Module, setting: Setting) -> nn.Module:
    """No communication: what computing alone takes, of a rank with the whole model."""
    return model.to(setting.device)


def _ddp(model: nn.Module, setting: Setting, **options: bool) -> nn.Module:
    return DDP(model.to(setting.device), **options)


def _messages(
    model: nn.Module, setting: Setting, gathers: int, meanwhile: bool = False
) -> nn.Module:
    return MessagesAlone(model, setting.device, gathers, meanwhile)


def _pairs(device: torch.device) -> DeviceMesh:
    """For hybrid sharding: pairs of ranks share a replica."""
    shape = dist.get_world_size() // 2, 2
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def _is_block_or_end(module: nn.Module) -> bool:
    """A block, an embedding or the head: nothing but a norm is left for the root."""
    head = isinstance(module, nn.Linear) and module.bias is None
    return head or isinstance(module, Block | nn.Embedding)


def _flat(
    library: Any,
    policy: Any,
    strategy: str,
    units: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> Wrap:
    """minifsdp or FSDP1, whose arguments are the same."""

    def wrap(model: nn.Module, setting: Setting) -> nn.Module:
        precision = torch.bfloat16 if setting.bf16 else None
        given = {"device_mesh": _pairs(setting.device)} if strategy == "HYBRID_SHARD" else {}
        return library.FullyShardedDataParallel(  # type: ignore[no-any-return]
            model,
            sharding_strategy=library.ShardingStrategy[strategy],
            auto_wrap_policy=policy(units or (lambda module: isinstance(module, setting.blocks))),
            mixed_precision=library.MixedPrecision(precision, precision),
            cpu_offload=library.CPUOffload(setting.offload),
            device_id=setting.device,
            **given,
            **options,
        )

    return wrap


def _for_far_links(model: nn.Module, setting: Setting) -> nn.Module:
    """As tutorials/reference/using.md says: three blocks are gathered ahead, and the last stays."""
    root: Any = as_fsdp2(model, setting, reshard=True, keep_last=True, library=minifsdp)
    blocks: list[Any] = [*filter(_is_block, root.modules())]
    for at, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[at + 1 :][:3])
        block.set_modules_to_backward_prefetch(blocks[:at][::-1][:3])
    root.set_modules_to_forward_prefetch(blocks[:3])
    root.set_modules_to_backward_prefetch(blocks[::-1][:3])
    return root  # type: ignore[no-any-return]


def _for_slow_links(strategy: str) -> Wrap:
    """As tutorials/reference/using.md says: embeddings and the head are units of their own, and
    stay from forward to backward, as does the last block."""

    def wrap(model: nn.Module, setting: Setting) -> nn.Module:
        *_, last = filter(_is_block, model.modules())
        stays = {"sharding_strategy": minifsdp.ShardingStrategy.SHARD_GRAD_OP}

        def units(module: nn.Module) -> Any:
            freed = _is_block(module) and module is not last
            return freed or (stays if _is_block_or_end(module) else False)

        return _flat(minifsdp, minifsdp.CustomPolicy, strategy, units, forward_prefetch=True)(
            model, setting
        )

    return wrap


POST, THEIR_POST = (of.BackwardPrefetch.BACKWARD_POST for of in (minifsdp, theirs))
_mini = partial(_flat, minifsdp, minifsdp.CustomPolicy)
_fsdp1 = partial(_flat, theirs, TheirPolicy)


def _by_gloo(model: nn.Module, setting: Setting) -> nn.Module:
    """Through the network code of the system, as between machines."""
    group = dist.new_group()
    same_machine.neighbors[group] = {}  # nobody looks for any, then
    wrap = _mini("FULL_SHARD", forward_prefetch=True, process_group=group)
    return wrap(model, setting)


def as_fsdp2(
    model: nn.Module,
    setting: Setting,
    reshard: bool,
    tuned: bool = False,
    keep_last: bool = False,
    hybrid: bool = False,
    library: Any = theirs,
) -> nn.Module:
    """FSDP2, or minifsdp as it.

    Args:
        tuned: each block asks for the next one, and no unshard waits for the one before.
        keep_last: the last block keeps its parameters for the backward, which comes at once.
        hybrid: pairs of ranks share a replica.
    """
    options: dict[str, Any] = {"mesh": _pairs(setting.device)} if hybrid else {}
    if setting.bf16:
        options["mp_policy"] = theirs.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    if setting.offload:
        options["offload_policy"] = theirs.CPUOffloadPolicy(pin_memory=False)
    model.to("cpu" if setting.offload else setting.device)
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, setting.blocks)]
    for block in blocks:
        freed = reshard and not (keep_last and block is blocks[-1])
        library.fully_shard(block, reshard_after_forward=freed, **options)
    # None: it is the root, which stays, as by default. True would gather it a second time.
    stays = None if reshard else False
    root: Any = library.fully_shard(model, reshard_after_forward=stays, **options)
    if tuned:
        for before, after in pairwise(blocks):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        for module in (root, *blocks):
            module._set_unshard_async_op(True)
    return root  # type: ignore[no-any-return]


CONTENDERS: dict[str, Wrap] = {
    "local": _local,
    "messages": partial(_messages, gathers=2),
    "messages grad_op": partial(_messages, gathers=1),
    "meanwhile": partial(_messages, gathers=2, meanwhile=True),
    "meanwhile grad_op": partial(_messages, gathers=1, meanwhile=True),
    "DDP": _ddp,
    "DDP bucket view": partial(_ddp, gradient_as_bucket_view=True),
    "FSDP1": _fsdp1("FULL_SHARD"),
    "FSDP1 prefetch": _fsdp1("FULL_SHARD", forward_prefetch=True),
    "FSDP1 orig": _fsdp1("FULL_SHARD", use_orig_params=True),
    "FSDP1 grad_op": _fsdp1("SHARD_GRAD_OP"),
    "FSDP1 lean": _fsdp1("FULL_SHARD", _is_block_or_end, backward_prefetch=THEIR_POST),
    "FSDP1 hybrid": _fsdp1("HYBRID_SHARD", forward_prefetch=True),
    "FSDP2": partial(as_fsdp2, reshard=True),
    "FSDP2 tuned": partial(as_fsdp2, reshard=True, tuned=True),
    "FSDP2 grad_op": partial(as_fsdp2, reshard=False),
    "FSDP2 hybrid": partial(as_fsdp2, reshard=True, tuned=True, hybrid=True),
    "mini": _mini("FULL_SHARD"),
    "mini prefetch": _mini("FULL_SHARD", forward_prefetch=True),
    "mini gloo": _by_gloo,
    "mini grad_op": _mini("SHARD_GRAD_OP", forward_prefetch=True),
    "mini slow link": _for_slow_links("FULL_SHARD"),
    "mini slow link grad_op": _for_slow_links("SHARD_GRAD_OP"),
    "mini far link": _for_far_links,
    "mini lean": _mini("FULL_SHARD", _is_block_or_end, backward_prefetch=POST),
    "mini rows": _mini("FULL_SHARD", forward_prefetch=True, use_orig_params=True),
    "mini rows grad_op": _mini("SHARD_GRAD_OP", forward_prefetch=True, use_orig_params=True),
    "mini rows keep last": partial(as_fsdp2, reshard=True, keep_last=True, library=minifsdp),
    "mini hybrid": _mini("HYBRID_SHARD", forward_prefetch=True),
    "mini no_shard": _mini("NO_SHARD"),
}
"""By the names that `--only` takes. Those with bf16 or offload leave out what has neither."""
MEANWHILE = ("meanwhile", "meanwhile grad_op")
"""For slow links: on one machine nothing is sent meanwhile."""
HYBRID = ("FSDP1 hybrid", "FSDP2 hybrid", "mini hybrid")
"""For more than two ranks."""
ALONE = ("local", "messages", "messages grad_op", *MEANWHILE)
"""They train for themselves, so that their losses are not those of the others."""
PLAIN = (*ALONE, "DDP", "DDP bucket view")
"""They have neither a `MixedPrecision` nor an offload of their own."""
