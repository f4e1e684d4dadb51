"""FSDP2: python tutorials/25_fsdp2.py; the page is 25_fsdp2.md."""

# %% [markdown]
# # FSDP2 in practice: `fully_shard`
#
# You fine-tune the GPT of `make demo`, and its LayerNorms should stay as they are. So you look for
# parameters with "norm" in their names, and find none. Each unit has one parameter, `_flat_param`.
# That is how it is in minifsdp, and how it was in PyTorch's first FSDP (unless one passes
# `use_orig_params=True`). PyTorch has since rewritten FSDP around this problem. The new one is
# called `fully_shard`, or *FSDP2*
# ([pytorch#114299](https://github.com/pytorch/pytorch/issues/114299)), and [the
# documentation](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) recommends
# it to everybody who is starting. What did it change, how does one train with it, and what does it
# cost?
#
# The idea is that a parameter stays a parameter. Here is one block of the GPT, as rank 0 of two
# sees it, under FSDP and under `fully_shard`, which minifsdp has as well. (Torch's would print the
# same names and shapes once more, so only its losses are shown.)

# %% [hidden]
import warnings
from functools import partial
from itertools import groupby
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from draw import strips
from launch import on_ranks
from torch import nn
from torch.distributed import get_rank, get_world_size
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn.functional import cross_entropy
from train_gpt import GPT, Block

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({Block})
COLOURS = ("gray", "blue", "amber", "purple", "orange", "green", "red")


def gpt():
    torch.manual_seed(0)
    return GPT(layers=2, width=128)


def mesh(*shape, names=None):
    kind = torch.get_default_device().type
    return init_device_mesh(kind, shape or (get_world_size(),), mesh_dim_names=names)


def say(*words):
    if get_rank() == 0:
        print(*words)


def loss_of(model, seed):
    torch.manual_seed(10 * seed + get_rank())
    tokens = ((torch.randint(26, (2, 1)) + torch.arange(32)) % 26).to(mesh().device_type)
    logits = model(tokens).flatten(0, 1).float()
    return cross_entropy(logits, (tokens.flatten() + 1) % 26)


def train(model):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.003), []
    for step in range(3):
        losses.append(loss_of(model, step))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def small_block():
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@on_ranks(3)
def layout():
    models = [small_block(), small_block()]
    for model in models:
        for number, param in enumerate(model.parameters(), 1):
            param.data.t().copy_(100 * number + torch.arange(len(param)))  # the same along a row
    a, b = FSDP(models[0]).engine.root, torchs_fully_shard(models[1], mesh=mesh())
    return [a.padded_shard.tolist()], [p.to_local().flatten().tolist() for p in b.parameters()]


def draw():
    ranks, rows = layout(), []
    for way, title in enumerate(("in chunks: one flat tensor, cut in three", "in rows: FSDP2")):
        rows.append((title, []))
        for rank, held in enumerate(ranks):
            values = []
            for piece, longest in zip(held[way], ranks[0][way], strict=True):
                values += piece + [0.0] * (len(longest) - len(piece))
            runs = [(int(value), len(list(same))) for value, same in groupby(values)]
            boxes = [(n, COLOURS[v // 100], f"row {v % 100}" if v else "") for v, n in runs]
            rows.append((f"rank {rank}", boxes))
            assert len(values) == (18, 21)[way]  # elements that each rank sends
    names = ("padding", *dict(small_block().named_parameters()))
    legend = dict(zip(COLOURS, names, strict=True))
    title = "What each of three ranks has of two linear layers and a LayerNorm; widths are elements"
    strips(Path(__file__).with_suffix(".svg"), title, rows, legend)


# %%
def fsdp2(fully_shard, model: GPT, **settings) -> GPT:
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


@on_ranks(2)
def side_by_side() -> list[list[float]]:
    found = []
    for way, model in {
        "FSDP": FSDP(gpt(), auto_wrap_policy=POLICY),
        "minifsdp.fully_shard": fsdp2(minifsdp.fully_shard, gpt(), mesh=mesh()),
        "torch's fully_shard": fsdp2(torchs_fully_shard, gpt(), mesh=mesh()),
    }.items():
        found.append(train(model))
        say(f"{way} ({type(model).__name__}), losses", *(f"{loss:.3f}" for loss in found[-1]))
        for name, param in [*model.named_parameters()] if "torch" not in way else []:
            if "blocks.0" in name:
                here = param.to_local() if hasattr(param, "to_local") else param
                say(f"    {name:23} {tuple(param.shape)}, of which here {tuple(here.shape)}")
    return found


# %% [markdown]
# `fully_shard` is called on each block, then on the model. Each call makes a unit of the parameters
# that no unit inside has, as a policy does in FSDP. As in FSDP, hooks gather a unit before it is
# used and free it afterwards. Two things are different:
#
# - There is no wrapper. The module stays where it is, and only its class becomes a subclass, with
#   hooks: a `Block` becomes an `FSDPBlock`. So names stay what they were.
# - A parameter stays a parameter of its own, a *DTensor* ("distributed tensor"). It knows the
#   whole shape, `(384, 128)` for instance, and which part of it this rank has: 192 of the 384
#   *rows*. A row of a matrix is what has one index along its first dimension.
#
# The losses of all three are the same, in every bit. They gather whole parameters to compute with,
# so it makes no difference who keeps which numbers in the meantime. This picture shows who does,
# for two small layers and a LayerNorm on three ranks:
#
# ![Two groups of three strips. Above, a flat tensor is cut in three, and row 4 of the purple weight
# is half on rank 0 and half on rank 1. Below, each parameter is cut by itself, between rows, and
# rank 2 has gray padding where there were not enough rows.](25_fsdp2.svg)
#
# Look for row 4 of the purple weight. In chunks one half of it is on rank 0 and the other half on
# rank 1. (It comes first, since its length is a multiple of eight; see page
# [02](02_flatten.md).) In rows no row is ever cut. The price is padding: each parameter is padded
# for itself and not the unit once, so in this example a rank sends 21 elements and not 18.
#
# ## What breaks without rows
#
# A tensor has one `requires_grad`. So a flat tensor is frozen or trained as a whole. Let us try to
# freeze the LayerNorms after all:


# %%
@on_ranks(2)
def frozen_norms() -> None:
    for wrap in (partial(FSDP, auto_wrap_policy=POLICY), partial(fsdp2, minifsdp.fully_shard)):
        model = gpt()
        for name, param in model.named_parameters():
            param.requires_grad = "norm" not in name
        try:
            say("fully_shard trains:", *(f"{loss:.3f}" for loss in train(wrap(model))))
        except ValueError as refusal:
            say("in chunks:", refusal)


# %% [markdown]
# minifsdp refuses, because there is no right answer in chunks. (With `use_orig_params=True`
# PyTorch's first FSDP takes such a model, but [its
# documentation](https://docs.pytorch.org/docs/stable/fsdp.html) recommends avoiding that, as
# gradients take more memory than one expects: they are there for the frozen parameters, too.) The
# same goes for all that treats parameters as parameters: less weight decay for some, an optimizer
# that looks at a matrix by its rows, a norm for each layer.
#
# minifsdp has rows as well: `FSDP(..., use_orig_params=True)` and `minifsdp.fully_shard` make them.
# Page [26](26_rows.md) shows how that works.
#
# ## A training program
#
# This is what a program with `fully_shard` looks like. It accumulates gradients over two
# micro-batches, clips them, and takes the whole model for a checkpoint at the end:


# %%
def program(fully_shard, **settings):
    model = fsdp2(fully_shard, gpt(), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)  # after fully_shard
    for step in range(3):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            (loss_of(model, 2 * step + last) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return norm.full_tensor(), get_model_state_dict(model, options=everything)


def compare(name, **settings) -> None:
    a, b = (program(way, **settings) for way in (torchs_fully_shard, minifsdp.fully_shard))
    same = a[0] == b[0] and all(a[1][key].equal(b[1][key]) for key in a[1] | b[1])
    say(f"{name:32} gradients' norm {a[0].item():.2f}; torch's and minifsdp's are the same: {same}")


@on_ranks(2)
def one_dimension() -> None:
    compare("fp32", mesh=mesh())
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare("mp_policy: bf16", mesh=mesh(), mp_policy=bf16)
    compare("reshard_after_forward=False", mesh=mesh(), reshard_after_forward=False)
    if mesh().device_type == "cpu":  # with NCCL alone nobody can add up norms on the host
        compare("CPUOffloadPolicy", mesh=mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))


@on_ranks(4)
def two_dimensions() -> int:
    grid = mesh(2, 2, names=("replicate", "shard"))
    compare("2 x 2 ranks", mesh=grid)
    return minifsdp.fully_shard(nn.Linear(4, 4), mesh=grid).weight.to_local().numel()


# %% [markdown]
# In each line a norm and 29 tensors of the model were compared, and the two libraries agree in
# every bit. Here are the parts:
#
# - **Units.** There is no policy. You call `fully_shard` on each block and then on the model, the
#   inner ones first. Make the optimizer afterwards, from the DTensors.
# - **`mesh`** says over which ranks to shard. With one dimension it is all of its ranks. With two,
#   `("replicate", "shard")`, it is hybrid sharding (page [22](22_hybrid.md)): shards along the
#   second dimension, and copies of them along the first.
# - **`mp_policy`** has the dtypes to compute and to reduce in (page [14](14_precision.md)). Shards
#   stay in fp32.
# - **`offload_policy=CPUOffloadPolicy()`** keeps shards and optimizer on the host (page
#   [17](17_offload.md)). The norm is then computed on the host as well. On GPUs this takes a second
#   backend beside NCCL: `init_process_group("cpu:gloo,cuda:nccl")`.
# - **`reshard_after_forward=False`** keeps parameters whole from the forward to the backward (page
#   [16](16_groups.md)). A number says how many ranks share them in the meantime, such as those of
#   one machine. By default the root keeps its own, because its backward comes first.
# - **`set_requires_gradient_sync(False)`** is `no_sync` (page [20](20_no_sync.md)). Waiting
#   gradients are in the `reduce_dtype`. If you forget the True, torch's `fully_shard` leaves the
#   parameters without gradients. Then the norm is 0 and the step changes nothing, without an error
#   ([seen with torch 2.13](../tests/test_lessons.py)). minifsdp refuses the step.
# - **Clipping** is PyTorch's ordinary function. The norm of a DTensor is that of all its rows, on
#   all ranks (page [21](21_clip_grad.md)).
# - **Saving.** `get_model_state_dict` gives DTensors under the names of the plain model. With
#   `full_state_dict` it gives whole tensors, and with `cpu_offload` as well only rank 0 gets them.
#   For a large model give the DTensors to `torch.distributed.checkpoint`, so that each rank writes
#   its own rows (page [27](27_checkpoints.md)).
#
# If you come from FSDP1, this is where its arguments and methods went:
#
# | FSDP1 | FSDP2 |
# | --- | --- |
# | `auto_wrap_policy` | a loop that calls `fully_shard`, inner modules first |
# | `FULL_SHARD`, `SHARD_GRAD_OP` | `reshard_after_forward=True`, `False` |
# | `HYBRID_SHARD`, `process_group`, `device_id` | `mesh` |
# | `NO_SHARD` | none: use DDP |
# | `mixed_precision` | `mp_policy`; buffers keep their dtype |
# | `cpu_offload` | `offload_policy` |
# | `ignored_states` | `ignored_params` |
# | `use_orig_params` | always so |
# | `limit_all_gathers` | not needed |
# | `backward_prefetch` | always PRE; `set_modules_to_backward_prefetch` for a different order |
# | `forward_prefetch` | `set_modules_to_forward_prefetch` |
# | `param_init_fn` | build on meta, `fully_shard`, `to_empty`, then initialize |
# | `sync_module_states` | `set_model_state_dict` with `broadcast_from_rank0=True` |
# | `no_sync()` | `set_requires_gradient_sync(False)` |
# | `model.clip_grad_norm_` | `torch.nn.utils.clip_grad_norm_` |
# | `summon_full_params` | `unshard()` and `reshard()`; `param.full_tensor()` |
# | `state_dict_type` | `get_model_state_dict`, `get_optimizer_state_dict` |
#
# ## What goes beside it
#
# FSDP cuts what is stored, not what is computed: a whole layer, and its activations, still have to
# fit on one GPU. For models that are too large for that, PyTorch combines it with two more kinds of
# parallelism, each along a dimension of its own of the same mesh. *Tensor parallelism* cuts each
# matrix, so that several GPUs compute one product, and they exchange activations within each layer.
# That takes fast links, so it is the *last* dimension, whose ranks are in one machine. First
# `parallelize_module(block, mesh["tp"], plan)` cuts the parameters, and then `fully_shard(block,
# mesh=mesh["dp"])` cuts them once more, which a DTensor can express. *Pipeline parallelism* gives
# each group of GPUs some of the layers. Only the activations between two groups are sent, so it is
# the *first* dimension, across machines, and each stage is a model of its own that is given to
# `fully_shard`. In torchtitan the [order of
# dimensions](https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/parallel_dims.py)
# is `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`. (`cp`, context parallelism, cuts long texts, and
# FSDP shards along `dp_shard` and `cp` together.) minifsdp itself cuts no product. But its
# `fully_shard` takes layers that are tensor-parallel already, and cuts their parameters once more,
# as torch's does ([an example](reference/using.md#tensor-parallel-layers)). Torch's pipeline stages
# know torch's own `fully_shard` only.
#
# ## What it costs
#
# A collective sends one piece of memory. So FSDP2 copies the rows of a unit into one buffer before
# a gather. And what has arrived is sorted by ranks, not by parameters, so it is copied once more,
# out of the buffer to where each parameter is whole. minifsdp saves both copies in chunks: it
# gathers straight into the memory that layers compute with. Page [26](26_rows.md) shows that the
# second copy is good for something, too: because of it FSDP2 needs no limiter.
#
# ## Predict, then run
#
# 1. A head has one output, `nn.Linear(1000, 1)`. Its weight has one row. How many of its elements
#    does each of two ranks update?
# 2. The optimizer is made before torch's `fully_shard`. What does it change in a step?
# 3. How much of each matrix does a rank have in the last line that was printed, with 2 x 2 ranks?
#
# <details><summary>Answers</summary>
#
# 1. Rank 0 updates all 1,000, and rank 1 none. A row is never cut.
# 2. Nothing, and no error says so. It has the tensors from before, which are not in the model any
#    more and get no gradients. (minifsdp puts the DTensors into it, if it has not stepped yet.)
# 3. Half of it, and not a quarter. The four ranks are two copies, and each is cut in two.
#
# </details>


# %% [hidden]
@on_ranks(2)
def asked() -> tuple[int, bool]:
    rows = torchs_fully_shard(nn.Linear(1000, 1), mesh=mesh()).weight.to_local().numel()
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    torchs_fully_shard(layer, mesh=mesh())
    before = layer.weight.full_tensor().clone()
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return rows, before.equal(layer.weight.full_tensor())


def answers() -> None:
    # 1. Rank 0 has all elements, rank 1 none.
    # 2. The weight is what it was, on both ranks.
    assert asked() == [(1000, True), (0, True)]
    assert len(gpt().state_dict()) == 29  # tensors that each line of the program compares


# %% [hidden]
def main() -> None:
    for found in side_by_side():
        assert found[0] == found[1] == found[2]  # chunks and rows, in every bit
    frozen_norms()
    one_dimension()
    assert two_dimensions() == [4 * 4 // 2] * 4  # 3. half of it
    draw()
    answers()


if __name__ == "__main__":
    main()
