"""Mixed precision: python tutorials/14_precision.py; the page is 14_precision.md."""

# %% [markdown]
# # Mixed precision: what may be rounded, and what must not
#
# So far a parameter has had 4 bytes. In *bfloat16* (bf16) it has 2, so every gather sends half as
# much, and a GPU multiplies much faster: an A100 does 312 TFLOPS in bf16 and 19.5 in fp32, by [its
# data sheet](https://www.nvidia.com/en-us/data-center/a100/). Then why not write `model.bfloat16()`
# and be done? The GPT of `make demo`, both ways, with a small learning rate:

# %% [hidden]
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import grow
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cast_weights import weights_of_a_forward
from launch import on_ranks
from one_file import FILE
from taken_out import gradients, layer, off_ddps, stage, three_times
from torch import Tensor, nn
from train_gpt import CONTEXT, GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy
from minifsdp.comm.collectives import reduce_scatter
from minifsdp.precision import Cast, Precision
from minifsdp.sim import VirtualGpu
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.views.timeline import svg

TEXT = torch.frombuffer(bytearray(FILE.read_bytes()), dtype=torch.uint8).long()
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
POLICY = ModuleWrapPolicy({Block})
torch.set_num_threads(1)


def gpt(dtype: torch.dtype = FP32) -> GPT:
    torch.manual_seed(0)
    return GPT(layers=4, width=128).to(dtype)


def loss_of(model: nn.Module, seed: int, batch: int = 1) -> Tensor:
    sampler = torch.Generator().manual_seed(seed)
    at = torch.randint(len(TEXT) - CONTEXT - 1, (batch,), generator=sampler)
    rows = torch.stack([TEXT[i : i + CONTEXT + 1] for i in at.tolist()])
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


def train(model: nn.Module, lr: float, steps: int) -> tuple[list[float], list[float]]:
    """The mean loss of all ranks, and which part of this rank's numbers has changed, by step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, parts = [], []
    for step in range(steps):
        loss = loss_of(model, seed=2 * step + dist.get_rank())
        loss.backward()
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        changed = nn.utils.parameters_to_vector(model.parameters()) != before
        parts.append(changed.float().mean().item())
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / dist.get_world_size())
    return losses, parts


# %%
WAYS = {
    "fp32": (FP32, MixedPrecision()),
    "bf16 weights": (BF16, MixedPrecision()),
    "mixed": (FP32, MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)),
}


@on_ranks(2)
def three_ways() -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for name, (dtype, precision) in WAYS.items():
        model = FSDP(gpt(dtype), auto_wrap_policy=POLICY, mixed_precision=precision)
        found[name] = train(model, lr=1e-5, steps=8)
    return found


def small_steps() -> None:
    for name, (losses, parts) in three_ways()[0].items():
        print(f"{name:12}  loss {losses[0]:.2f} to {losses[-1]:.2f}; "
              f"the last step changed {parts[-1]:4.0%} of the parameters")  # fmt: skip


# %% [markdown]
# With weights in bf16 most steps of most parameters do nothing. The reason is in this table:


# %%
def three_formats() -> None:
    for dtype in (FP32, BF16, FP16):
        info = torch.finfo(dtype)
        print(f"{str(dtype)[6:]:9} {info.bits} bits; after 1.0 comes 1 + {info.eps:.1e}; "
              f"from {info.smallest_normal:.0e} to {info.max:.0e}")  # fmt: skip
    weight = torch.tensor(1.0, dtype=BF16)
    for _ in range(1000):
        weight -= 0.001
    print("1.0, less 0.001, a thousand times, in bf16:", weight.item())


# %% [markdown]
# A floating-point number has some bits for its size (the *exponent*) and some for its digits (the
# *mantissa*). bf16 is fp32 with 16 bits of the mantissa cut off. It reaches as far, and it has a
# precision of two to three digits. Next to 1.0 there is nothing nearer than 1.008 or 0.996. So an
# update of 0.001 is rounded away, and a thousand of them, too. In training this is `lr * update`
# next to the weight. While the learning rate is large it works; when it has decayed, or when you
# fine-tune, the model stops learning, and no error says so.
# ([torchtune#2254](https://github.com/meta-pytorch/torchtune/issues/2254) is such a case, as
# reported.)
#
# *Mixed precision* keeps each number where it can be rounded with least harm
# ([Micikevicius et al.](https://arxiv.org/abs/1710.03740)): products are computed in bf16, and
# what is *added up over a long time* is kept in fp32. The weights are a sum of all updates. The
# optimizer's averages are sums of gradients. With FSDP this costs hardly any memory: what is in
# fp32 is the shard, which is small, and what is gathered is a copy in bf16. In the file of page 06
# this means three changes: the tensor that is gathered into has a different dtype, and two tensors
# are cast before they are sent. Which two? The program that grows has the answer in its step
# `14_precision`, which is folded at the end of this page:


# %%
@on_ranks(2)
def in_one_file() -> None:
    shards, engine = gpt(), gpt()
    grow.load("14_precision").fsdp(shards, Block, param_dtype=BF16, reduce_dtype=FP32)
    engine = FSDP(engine, auto_wrap_policy=POLICY, mixed_precision=WAYS["mixed"][1])
    same = train(shards, lr=1e-3, steps=4)[0] == train(engine, lr=1e-3, steps=4)[0]
    print("the losses are those of minifsdp's MixedPrecision, bit for bit:", same)
    assert same


# %% [markdown]
#
# ## Half the bytes, on virtual GPUs
#
# A GPT of 1.3 billion parameters on two machines of 8 GPUs, with 400 Gbit/s between them:


# %%
RUN = "--model gpt-1.3b --gpu a100-80 --nodes 2 --network 400 --batch 4 --seq 1024 --precision "


def in_time() -> dict[str, VirtualGpu]:
    gpus = {}
    for precision in ("fp32", "bf16-fp32", "bf16"):
        gpus[precision] = simulate(parser().parse_args((RUN + precision).split()))
        report = gpus[precision].report()
        print(f"{precision:9} step {report['step'] * 1e3:5.0f} ms, "
              f"{report['bytes sent'] / 1e9:4.1f} GB sent by a GPU, "
              f"peak {report['peak allocated'] / 2**30:4.1f} GiB")  # fmt: skip
    return gpus


# %% [hidden]
def draw(gpus: dict[str, VirtualGpu]) -> None:
    both = "bf16-fp32", "bf16"
    tapes = {f"gathers in bf16, reductions in {name[-4:]}": gpus[name].tape for name in both}
    Path(__file__).with_suffix(".svg").write_text(svg(tapes))
    assert [round(gpus[name].report()["step"] * 1e3) for name in both] == [281, 240]  # its text


# %% [markdown]
# ![Two timelines of a step, forward and backward, with computation above gathers and reductions.
# In both the gathers are as long. With reductions in fp32 each is twice as long as in bf16, and
# the step takes 281 ms and not 240.](14_precision.svg)
#
# Most of the gain in time is that of the matrix products. (The simulator's fp32 does not use TF32,
# with which an A100 would do 156 TFLOPS by [its data
# sheet](https://www.nvidia.com/en-us/data-center/a100/).) The bytes halve where both are in bf16.
# With reductions in fp32 they fall by a third only. Is that worth it?
#
# ## What breaks without fp32 in the reduction
#
# Each rank divides its gradient by the number of ranks. Then the parts are added up, in a ring: the
# first rank sends its part to the second, which adds its own and sends the sum on, and so on. In
# bf16 every one of these sums is rounded. Take the simplest of all gradients, 1.0 on each rank:


# %%
def add_in_a_ring(gradients: list[Tensor]) -> Tensor:
    return sum(grad / len(gradients) for grad in gradients)


def a_mean_of_ones() -> None:
    for ranks in (8, 64, 128, 256, 512, 1024):
        mean = add_in_a_ring([torch.ones(1, dtype=BF16)] * ranks)
        print(f"{ranks:5} ranks: the mean of ones is {mean.item()}")


def a_mean_of_gradients() -> None:
    model, grads = gpt(), []
    for rank in range(64):
        loss_of(model, seed=rank).backward()
        grads.append(gradients(model).to(BF16))
        model.zero_grad()
    for ranks in (2, 8, 64):
        exact = torch.stack(grads[:ranks]).double().mean(0)
        off = [(add_in_a_ring([g.to(dtype) for g in grads[:ranks]]) - exact).norm() / exact.norm()
               for dtype in (BF16, FP32)]  # fmt: skip
        assert off[1] < 1e-6
        print(f"{ranks:4} ranks: the mean of gradients is off by {off[0]:.1%} in bf16, "
              "and by less than 0.0001 % in fp32")  # fmt: skip


# %% [markdown]
# With 1,024 ranks the sum stops at a quarter. There the next number in bf16 is 1/512 away, and what
# each rank adds is 1/1,024, half of that, so it is rounded away. A real gradient has noise of both
# signs, so it comes off better, but the error grows with the number of ranks. NCCL's authors [say
# the same of their rings](https://github.com/NVIDIA/nccl/issues/855) ("the individual value is too
# small to be incorporated into the total sum"); [its trees are much more
# stable](https://github.com/NVIDIA/nccl/issues/1026), because they add numbers of one size. With
# few ranks the error drowns in the noise of the batch, and bf16 is fine. With hundreds, pay for
# `reduce_dtype=torch.float32`.
#
# ## Why not torch.autocast?
#
# With one GPU mixed precision is `torch.autocast`: parameters are in fp32, and each operation that
# is fast in bf16 casts what it gets. This runs with FSDP, too, but it casts at a different place:
# *after* the gather. Here are both ways, by how much one forward has gathered at once, and how much
# of the weights it has left in memory for the backward (`weights_of_a_forward`, in
# [cast_weights.py](cast_weights.py), looks at what was cast):


# %%
def two_places_of_a_cast() -> None:
    weights_of_a_forward({"MixedPrecision": WAYS["mixed"][1], "autocast": None})


# %% [markdown]
# With autocast a unit is gathered in fp32, which takes twice the bytes in both gathers of a step.
# And autograd keeps what a weight was cast to until the backward. The unit is freed after its
# forward, its copy is not. So at the end of the forward each rank has all linear layers in bf16,
# as if they were not sharded. `MixedPrecision` casts the *shard*, before it is sent. What arrives
# is what the layers multiply with, and it is freed with the unit. What autocast does beside that,
# such as a softmax in fp32, is left to the model.
#
# ## Buffers and inputs
#
# A buffer is a tensor that a module keeps and that is no parameter: running statistics, a table of
# positions. Buffers are not sharded, so a lower precision saves next to nothing, and it can do
# harm: above 256 bf16 does not have all integers. Rotary embeddings that were computed in bf16 gave
# several positions the same angle
# ([transformers#25681](https://github.com/huggingface/transformers/issues/25681),
# [#29285](https://github.com/huggingface/transformers/pull/29285)). So `buffer_dtype` is None by
# default, and buffers keep their dtype. The floating-point *inputs* of the model are cast to
# `param_dtype`, or a layer would be asked to multiply bf16 by fp32, which PyTorch refuses. Tensors
# of integers, such as tokens, are left alone:
#
# {{ minifsdp/precision.py prepare_inputs }}
#
# ## Taken out: the cast of a gradient, and the layer
#
# In the engine mixed precision is three small parts of
# [`precision.py`](../minifsdp/precision.py), and each can be taken out. A *stage* of the reduction,
# `Cast`, has gradients added up in fp32. A *layer*, `Precision`, decides at the beginning of each
# forward which dtype units are gathered in, and casts what the modules are called with. (The third
# casts the shard before it is sent.) Here are the gradients of two ranks, against the mean in fp32
# that DDP would compute. `three_times`, in [taken_out.py](taken_out.py), runs a program as it is,
# without a part, and with the part put back:


# %%
@on_ranks(2)
def without_a_part() -> None:
    def program() -> str:
        model = FSDP(gpt(), auto_wrap_policy=POLICY, mixed_precision=WAYS["mixed"][1])
        return off_ddps(lambda one: loss_of(one, dist.get_rank()).backward(), model, gpt(BF16))

    assert "by 0.0%" in three_times(program, stage(Cast))[0]
    assert "Error" in three_times(program, layer(Precision))[1]


# %% [markdown]
# Without the stage nothing fails. The gradients are added up in the dtype in which they were
# computed, so this is the error of the table above, for two ranks. Without the layer no unit is
# told in which dtype to gather. It still has the tensor with which it was made, its own shard in
# fp32, and the error is about the splitting of that tensor. It names neither a dtype nor a unit.
#
# ## And fp16?
#
# fp16 has more digits and a shorter reach: gradients below 6e-5 lose digits and those below 3e-8
# become zero. So fp16 needs *loss scaling*: the loss is multiplied by a large number before the
# backward, and the gradients are divided by it before the step, which is skipped if one of them has
# overflowed on any rank (`minifsdp.ShardedGradScaler`). With bf16, which reaches as far as fp32,
# you need none of this.
#
# ## Predict, then run
#
# 1. On 64 ranks one billion parameters are trained with Adam. How many bytes does each rank keep in
#    fp32 between steps, and how many more if each had an fp32 copy of all parameters?
# 2. Adam's first step moves each weight by about the learning rate. With 1e-5, from which size on
#    does a weight in bf16 not move at all?
# 3. The table of positions has 300 rows, `torch.arange(300.)`. How many are told apart in bf16?
#
# <details><summary>Answers</summary>
#
# 1. Parameters and two averages of 4 bytes, shared by 64: 0.19 GB. (Gradients are another 0.06 GB
#    until the step.) An own copy on each rank would be 4 GB. This is why mixed precision and
#    sharding go well together.
# 2. Above 1/256, which is 0.0039. Up to 1/128 the next number is 3.1e-5 away, and 1e-5 is less than
#    half of that. A typical weight of this GPT is 0.02.
# 3. 279. Up to 256 all of them; from there to 300 only every second one.
#
# </details>


# %% [hidden]
@on_ranks(4)
def as_the_engine_adds() -> bool:
    grads = [torch.randn(64, generator=torch.Generator().manual_seed(r)).to(BF16) for r in range(4)]
    mine, finish = reduce_scatter(grads[dist.get_rank()].clone(), dist.group.WORLD, 1 / 4, tag=0)
    finish()
    # The ring ends at the rank that keeps the chunk.
    ring = [(dist.get_rank() - turn) % 4 for turn in (1, 2, 3)] + [dist.get_rank()]
    return torch.equal(mine, add_in_a_ring([grads[r] for r in ring]).chunk(4)[dist.get_rank()])


def answers() -> None:
    assert round(12e9 / 64 / 1e9, 2) == 0.19 and round(4e9 / 64 / 1e9, 2) == 0.06  # 1. 0.19 GB
    one, ends = torch.ones(2, dtype=BF16), torch.tensor([2.0, 0.0], dtype=BF16)
    assert [round(x, 3) for x in torch.nextafter(one, ends).tolist()] == [1.008, 0.996]
    below, above = (torch.tensor(weight, dtype=BF16) for weight in (0.0038, 1 / 256))
    assert below + 1e-5 != below and above + 1e-5 == above and round(1 / 256, 4) == 0.0039  # 2. so
    assert len(torch.arange(300.0).to(BF16).unique()) == 279  # 3. these many
    assert all(as_the_engine_adds()) and MixedPrecision().buffer_dtype is None


# %% [hidden]
def main() -> None:
    small_steps()
    three_formats()
    in_one_file()
    draw(in_time())
    a_mean_of_ones()
    a_mean_of_gradients()
    two_places_of_a_cast()
    without_a_part()
    answers()


if __name__ == "__main__":
    main()
