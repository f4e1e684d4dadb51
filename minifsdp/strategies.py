"""The strategies of a unit: what some units do differently from others. They are chosen here.

unshard.py asks ``unit.source`` what this rank sends in a gather::

    shard on the device                     OwnShard                         unshard.py
    shard on the host                       OwnShard --Upload-->             offload.py
    computed in low precision               OwnShard --CastShard-->          precision.py
    both                                    OwnShard --Upload--> --CastShard-->
    from forward to backward, if asked for  PostForwardShard                 post_forward.py

reduce.py has a gradient go through ``unit.stages``, in this order. (While gradients wait to be
reduced, no_sync.py adds a stage for them: before these, or after the reduce-scatter.) ::

    cast         to ``reduce_dtype``                        precision.py
    reduce       reduce-scatter in the shard group          reduce.py
                 all-reduce, if there is none (NO_SHARD)    reduce.py; on CPUs in halves.py
                 a user's communication hook                between_steps/comm_hooks.py
    replicate    all-reduce over replicas                   reduce.py; on CPUs in halves.py
    scale, hook  if a program asks for it                   users_comm.py
    download     with offload                               offload.py

Both files send and receive through ``unit.comm``, which depends on the device::

    on a CPU, as a rule            DirectMessages                           comm/unit_messages.py
    elsewhere                      TorchCollectives                         collectives.py
        if a program asks for it       --UsersCollectives-->                users_comm.py
                                       --Watched-->                         comm/unit_messages.py
        divided in rows                --InBlocks-->

views.py has the modules of a unit compute with what ``unit.view_maker`` makes::

    as a rule                      SplitViews                          views.py
    sharded, on a CPU              PieceViews                          support/piece_views.py
    in rows                        MarkedSplitViews, MarkedPieceViews  support/marked_views.py
        of DTensors                --TensorParallelViews-->            support/tensor_parallel.py

and ``unit.places`` show them to the modules, and take them away::

    always                         Placeholders                             support/param_views.py

What a unit does not need is not there, so it is neither asked nor called.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minifsdp.comm.blocks import Columns, in_one_piece
from minifsdp.comm.collectives import direct
from minifsdp.comm.unit_messages import DirectMessages, InBlocks, InBytes, Watched
from minifsdp.core.collectives import TorchCollectives
from minifsdp.core.reduce import AllReduce, ReduceScatter, Stage
from minifsdp.core.streams import Streams
from minifsdp.core.unshard import OwnShard
from minifsdp.core.views import SplitViews
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.halves import FirstHalf, SecondHalf
from minifsdp.mixed_rows import MixedRows
from minifsdp.offload import Download, Upload
from minifsdp.precision import Cast, CastShard
from minifsdp.rows import Rows
from minifsdp.support.marked_views import MarkedPieceViews, MarkedSplitViews
from minifsdp.support.param_views import Placeholders
from minifsdp.support.piece_views import PieceViews
from minifsdp.support.tensor_parallel import TensorParallelViews
from minifsdp.users_comm import UsersCollectives, with_choices


def set_strategies(unit: FeaturedUnit) -> None:
    """Choose those that do not depend on the device; for the rest see :func:`choose_strategies`."""
    unit.source = unit.own_source = source_of(unit)
    unit.places = Placeholders(unit.param_infos)


def source_of(unit: FeaturedUnit) -> Any:
    """What a unit sends of its shard, built from the inside outwards.

    Later only the layout can change this choice; see shard_changes.py. If a model is moved or cast,
    the sources look its shards up in their new place. With ``full_precision_in_eval`` the cast has
    nothing to do in an evaluation.
    """
    source: Any = OwnShard(unit.shard_group)
    if unit.offload_from is not None:
        source = Upload(source)
    # On the device, since a host casts slowly. A unit that is not sharded sends nothing: it copies
    # its shard, and copy_() casts on the way, without memory for a second copy.
    sends = unit.shard_group is not None or unit.mixed is not None  # which travels as bytes
    if unit.precision.param_dtype is not None and sends:
        source = CastShard(source)
    return source


def choose_strategies(units: Sequence[FeaturedUnit], streams: Streams) -> None:
    """Choose those that depend on the device: all but the sources.

    Args:
        streams: of the device that the units are computed on. Ask again when it changes.
    """
    for unit in units:
        unit.comm = comm_of(unit, streams.device)
        unit.view_maker = view_maker_of(unit, streams.device)
        unit.stages = with_choices(unit, stages_of(unit, streams))


def comm_of(unit: FeaturedUnit, device: torch.device) -> Any:
    """How what a unit sends and receives travels."""
    comm = _in_elements(unit, device)
    return InBytes(comm) if isinstance(unit.layout, MixedRows) else comm


def _in_elements(unit: FeaturedUnit, device: torch.device) -> Any:
    if _sends_pieces(unit, device) and not unit.users_comm.has_functions:
        return DirectMessages()
    comm: Any = TorchCollectives()
    if unit.users_comm.has_functions or unit.users_comm.reduce_group is not None:
        comm = UsersCollectives(comm, unit.users_comm)
    comm = Watched(comm)
    # A unit of one parameter has one block for each rank, in rows as in chunks.
    return comm if in_one_piece(unit.layout.blocks) else InBlocks(comm)


def view_maker_of(unit: FeaturedUnit, device: torch.device) -> Any:
    """What makes the views of a unit, and takes their gradients."""
    # An all-reduce writes its result to the flat gradient, and so has no use for pieces.
    in_pieces = _sends_pieces(unit, device) and unit.shard_group is not None
    maker: Any = PieceViews() if in_pieces else SplitViews()
    if isinstance(unit.layout, Rows) and unit.layout.marks:
        maker = MarkedPieceViews() if in_pieces else MarkedSplitViews()
    specs = [info.spec for info in unit.param_infos]
    return TensorParallelViews(maker, specs) if any(specs) else maker


def stages_of(unit: FeaturedUnit, streams: Streams) -> list[Stage]:
    """The stages that a gradient of ``unit`` goes through, in their order. It depends on the unit's
    groups, precision, offload and hook, and on the device: ask again when one of them changes.

    Args:
        streams: of the device that the unit is computed on.
    """
    dtype, hook = unit.precision.reduce_dtype, unit.comm_hook
    cast: list[Stage] = [] if dtype is None else [Cast(dtype)]
    download: list[Stage] = [] if unit.offload_from is None else [Download(streams)]
    if hook is not None:  # it averages over the only group that there is
        return [*cast, hook, *download]
    if unit.shard_group is None:
        return [*cast, *_all_reduce("reduce", streams), *download]
    if unit.replicate_group is None:
        return [*cast, ReduceScatter(), *download]
    return [*cast, ReduceScatter(), *_all_reduce("replicate", streams), *download]


def _all_reduce(first: str, streams: Streams) -> list[Stage]:
    """``first``: the stream on which it begins."""
    if direct(streams.device):
        return [FirstHalf(first), SecondHalf()]
    return [AllReduce(first)]


def _sends_pieces(unit: FeaturedUnit, device: torch.device) -> bool:
    """Whether the unit can be sent from the places where it is. A unit that is divided between
    columns cannot: each row would be a message. (It does not matter whether a program's function
    sends it: that may be chosen after the forward, which decides where gradients arrive.)"""
    return direct(device) and Columns not in map(type, unit.layout.blocks or ())
