"""Initial values: python tutorials/19_sync_states.py; the page is 19_sync_states.md."""

# %% [markdown]
# # Rank 0's values: one checkpoint for all ranks
#
# You want to continue the training of a model. Its values are in a file, a *checkpoint*, which rank
# 0 has read. The other ranks have built the model with random values. You wrap it on all ranks, and
# each rank keeps its shard. Which model is it now?
#
# Here rank 0 has a GPT that knows the alphabet: its loss is near zero when it names the next
# letter. Rank 1 has the same GPT, untrained. (`alphabet_loss` and `trained`, which is the
# checkpoint, are in [the program](19_sync_states.py).)

# %% [hidden]
import textwrap
import warnings
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import Row, strips
from launch import on_ranks
from taken_out import call, layer, three_times
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy
from torch.nn.functional import cross_entropy
from train_gpt import GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from minifsdp.checks.rank_agreement import RankAgreement

PICTURE = Path(__file__).with_suffix(".svg")
BLOCKS, DEMO, MiB = ModuleWrapPolicy({Block}), {"layers": 4, "width": 128}, 2**20
FULL_SHARD, _, NO_SHARD, HYBRID_SHARD, _ = ShardingStrategy
UNITS = ("root", *(f"blocks.{i}" for i in range(4)))
torch.set_num_threads(1)


def alphabet_loss(model: nn.Module) -> Tensor:
    letters = torch.arange(97, 123)
    return cross_entropy(model(letters[None, :-1])[0], letters[1:])


def trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    gpt = GPT(**DEMO)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.003)
    for _ in range(30):
        alphabet_loss(gpt).backward()
        optimizer.step()
        optimizer.zero_grad()
    return gpt.state_dict()


# %%
def built() -> GPT:
    """Trained on rank 0, random on the others."""
    torch.manual_seed(dist.get_rank())
    gpt = GPT(**DEMO)
    if dist.get_rank() == 0:
        gpt.load_state_dict(trained())
    return gpt


@on_ranks(2)
def wrapped(sync: bool) -> list[float]:
    gpt = built()
    before = alphabet_loss(gpt).item()
    with layer(RankAgreement):  # taken out; see below
        model = FSDP(gpt, auto_wrap_policy=BLOCKS, sync_module_states=sync)
    after = alphabet_loss(model).item()
    print(f"sync_module_states={sync}: loss before wrapping {before:5.2f}, after it {after:5.2f}")
    return [before, after]


# %% [hidden]
@on_ranks(2)
def origins(sync: bool) -> list[tuple[float, float]]:
    """How much of each unit is from rank 0, and how much is not, in numbers."""
    gpt = built()
    whole = {name: value.clone() for name, value in gpt.state_dict().items()}
    model = FSDP(gpt, auto_wrap_policy=BLOCKS, sync_module_states=sync)
    found = []
    for unit in UNITS:
        mine = [name for name in whole if (name[:8] if "blocks" in name else "root") == unit]
        gathered = model.state_dict()
        same = sum(int((whole[name] == gathered[name]).sum()) for name in mine)
        found.append((same, sum(whole[name].numel() for name in mine) - same))
    return found


def draw() -> None:
    rows: list[Row] = []
    for sync in (False, True):
        rows.append((f"sync_module_states={sync}", []))
        for unit, (same, other) in zip(UNITS, origins(sync)[0], strict=True):
            boxes = [(same, "blue", "rank 0's"), (other, "orange", "rank 1's")]
            rows.append((unit, [box for box in boxes if box[0]]))
    legend = {"blue": "values of the checkpoint", "orange": "random values"}
    strips(PICTURE, "the parameters of each unit, gathered after wrapping", rows, legend)
    shares = [same / (same + other) for same, other in origins(False)[0]]
    assert all(0.5 <= share < 0.51 for share in shares), shares
    assert all(other == 0 for _, other in origins(True)[0])


# %% [markdown]
# ![Two charts with a strip for each of five units. Without synchronization the left half of each
# strip has values of the checkpoint and the right half random values. With it each strip has values
# of the checkpoint from end to end.](19_sync_states.svg)
#
# Without `sync_module_states` each rank has cut its shard out of its own model. So a gathered unit
# is a patchwork, whose first half is trained and whose second half is random. No rank has ever had
# such a model, and it is as bad as the untrained one.
#
# PyTorch's first FSDP says nothing, and gets the same loss (`theirs`, in the program, runs it).
# minifsdp refuses such a model. It let this one pass only because one of its layers had been taken
# out.
#
# ## A broadcast for each unit
#
# With `sync_module_states=True` rank 0's values are sent to all ranks before the cut. The
# collective that does this is a *broadcast*: one rank sends a tensor, and all others in the group
# receive it. FSDP broadcasts each unit as soon as it has made it:
#
# {{ minifsdp/wrapping/materialize.py synchronize -Give all ranks -A shared tensor -_check_alike }}
#
# `own_params` are the unit's parameters and buffers. With hybrid sharding, on page
# [22](22_hybrid.md), there are two groups. First the column of rank 0 gets the values, then each
# row.
#
# DDP sends rank 0's values whenever it wraps a model. FSDP does so only if it is asked to. At first
# PyTorch's FSDP could not do it at all, until its authors [wanted it because of accuracy problems
# that are hard to find](https://github.com/pytorch/pytorch/issues/75870).
#
# ## Taken out: the step, and the layer that would have noticed
#
# The broadcast is a step of wrapping. What notices a missing broadcast is a layer, `RankAgreement`
# in [rank_agreement.py](../minifsdp/checks/rank_agreement.py). Before the first forward it compares
# three things between the ranks: what they have wrapped, their settings, and a *fingerprint* of the
# values ([same_model.py](../minifsdp/checks/same_model.py)). Below, the first program synchronizes,
# until the step is taken out. The second program does not synchronize, and loses the layer.
# (`three_times` is in [taken_out.py](taken_out.py).)


# %%
@on_ranks(2)
def without_a_part() -> None:
    def program(sync: bool) -> str:
        model = FSDP(built(), auto_wrap_policy=BLOCKS, sync_module_states=sync)
        return f"loss {alphabet_loss(model).item():.2f}"

    three_times(partial(program, True), call("minifsdp.wrapping.build.synchronize"))
    three_times(partial(program, False), layer(RankAgreement))


# %% [markdown]
# The error goes on to say what to do: use the same seed on all ranks, load the same checkpoint on
# all ranks, or pass `sync_module_states=True`.
#
# ## Only rank 0 has the memory
#
# In this example rank 1 has built a model whose values are never used. It could build the model on
# the meta device instead (page [18](18_materialize.md)). Then `param_init_fn` allocates memory
# without values, one unit at a time, and the broadcast fills it:


# %%
def memory_only(module: nn.Module) -> None:
    module.to_empty(device=torch.get_default_device(), recurse=False)


@on_ranks(2)
def others_on_meta() -> float:
    if dist.get_rank() == 0:
        gpt = built()
    else:
        with torch.device("meta"):
            gpt = GPT(**DEMO)
    size = sum(param.nbytes for param in gpt.parameters() if not param.is_meta)
    model = FSDP(gpt, auto_wrap_policy=BLOCKS, sync_module_states=True, param_init_fn=memory_only)
    loss = alphabet_loss(model).item()
    print(f"before wrapping {size / MiB:.1f} MiB; loss {loss:.2f}")
    return loss


# %% [markdown]
# Now only rank 0 has to hold the whole model at once. That is one copy in the whole cluster instead
# of one in each process. Even this copy can be avoided: with a distributed checkpoint (page
# [27](27_checkpoints.md)) each rank reads just what it needs.
#
# ## What breaks: ranks that are not alike
#
# A broadcast works only if every rank has a tensor of the same size and dtype to receive it.
# Suppose the checkpoint is in bfloat16, and rank 0 has made its model bfloat16 as well, but the
# others have not. Then rank 0 sends 2 bytes for each number, and rank 1 waits for 4. For this
# reason [all ranks of a user's program hung](https://github.com/pytorch/pytorch/issues/105840) with
# PyTorch's first FSDP. Another program went on with wrong values. It broadcast a table that was in
# fp32 on rank 0 and in bf16 on the other ranks, which [took the bytes of each number for two
# numbers](https://github.com/NovaSky-AI/SkyRL/pull/1725). Their loss was NaN. minifsdp compares
# first, and refuses on all ranks:


# %%
@on_ranks(2)
def other_dtypes() -> None:
    gpt = built()
    if dist.get_rank() == 0:
        gpt.bfloat16()
    try:
        FSDP(gpt, auto_wrap_policy=BLOCKS, sync_module_states=True)
    except ValueError as error:
        print(textwrap.fill(str(error), 90))


# %% [markdown]
# The thread about the program that hung began with models whose accuracy was random after such a
# broadcast. One piece of advice in it is
# [`recurse=False`](https://github.com/pytorch/pytorch/issues/105840), as in `memory_only` above.
# Without it the function would give new memory to everything below a module, including inner units
# that already have their values.
#
# ## Predict, then run
#
# 1. With `NO_SHARD` nothing is cut. What does each rank have without `sync_module_states`?
# 2. Four ranks use `HYBRID_SHARD` with two rows of two ranks, without `sync_module_states`. How
#    many different models are there, and how much of each is trained?
# 3. All ranks have read the checkpoint themselves. Is `sync_module_states` still needed?
#
# <details><summary>Answers</summary>
#
# 1. Its own model: rank 0 has the trained one, rank 1 a random one. From now on gradients are
#    averaged, so both models get the same updates and stay as far apart as they are.
# 2. Two. The first row has the patchwork of rank 0 and rank 1. The second row has one of rank 2 and
#    rank 3, in which nothing is trained.
# 3. No: each rank cuts its shard out of the same values. The price is a copy of the whole model in
#    each process, each of which has to read the whole file.
#
# </details>


# %% [hidden]
@on_ranks(2)
def alone() -> float:
    with layer(RankAgreement):
        model = FSDP(built(), auto_wrap_policy=BLOCKS, sharding_strategy=NO_SHARD)
    return alphabet_loss(model).item()


@on_ranks(2)
def theirs() -> float:
    model = TorchFSDP(
        built(), auto_wrap_policy=TorchPolicy({Block}), device_id=torch.get_default_device()
    )
    return alphabet_loss(model).item()


@on_ranks(4)
def in_rows() -> float:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2))
    settings = {"sharding_strategy": HYBRID_SHARD, "device_mesh": mesh}
    with layer(RankAgreement):
        model = FSDP(built(), auto_wrap_policy=BLOCKS, **settings)
    return alphabet_loss(model).item()


@on_ranks(2)
def all_have_read() -> float:
    gpt = GPT(**DEMO)
    gpt.load_state_dict(trained())
    return alphabet_loss(FSDP(gpt, auto_wrap_policy=BLOCKS)).item()


def answers(right: float, noise: float, patchwork: float) -> None:
    first, second = alone()
    assert abs(first - right) < 1e-4 and abs(second - noise) < 1e-4  # 1. its own
    a, b, c, d = in_rows()
    assert abs(a - patchwork) < 1e-4 and a == b != c == d > 4  # 2. two
    assert all(abs(loss - right) < 1e-4 for loss in all_have_read())  # 3. no
    assert all(abs(loss - patchwork) < 1e-4 for loss in theirs())


# %% [hidden]
def main() -> None:
    (before, patchwork), (noise, _) = wrapped(False)
    (_, synced), _ = wrapped(True)
    assert abs(before - synced) < 1e-4 and before < 0.3 and patchwork > 3
    draw()
    assert all(abs(loss - before) < 1e-4 for loss in others_on_meta())
    without_a_part()
    other_dtypes()
    answers(before, noise, patchwork)


if __name__ == "__main__":
    main()
