"""Parity: python tutorials/24_parity.py; the page is 24_parity.md."""

# %% [markdown]
# # Parity: a loss that falls proves nothing
#
# You have written a sharded engine. The model trains, and the loss falls. Is the engine right?
#
# Here are two engines, A and B. Each trains the GPT of `make demo`, with two blocks, on two ranks,
# from the same seed and on the same data. In one of the two no rank ever sees a gradient of the
# other rank. Before you read on: which one?

# %% [hidden]
import inspect
import sys
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from textwrap import dedent

warnings.filterwarnings("ignore", "Failed to initialize NumPy")
sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/ is beside tutorials/

import pytest
import torch
from draw import strips
from launch import on_ranks
from torch.nn.functional import cross_entropy
from train_gpt import GPT, Block

from minifsdp import ShardingStrategy, comm, halves
from minifsdp.core import reduce, shard, unshard
from minifsdp.sim import cluster
from tests import fuzz, lagging
from tests.models import Case
from tests.mutants import MUTANTS
from tests.parity import CASES, difference, full_parameters, reference, sharded, train

MODELS = {"gpt": "GPT", "twice": "called twice", "unused": "unused layer"}
MODELS |= {"frozen": "frozen layer", "conv": "convolutions", "odd": "odd sizes"}


def letters():
    return ((torch.randint(26, (2, 1)) + torch.arange(32)) % 26,)  # of the alphabet, in sequence


def next_letter(output, tokens):
    return cross_entropy(output.flatten(0, 1), (tokens.flatten() + 1) % 26)


CASES["gpt"] = Case(lambda: GPT(layers=2, width=128), (Block,), letters, next_letter)


@contextmanager
def mistake(name):
    function, right, wrong = MISTAKES.get(name, (train, "", ""))
    source, made, code = dedent(inspect.getsource(function)), {}, function.__code__
    assert right in source
    reference.cache_clear()  # DDP's results are kept, but not from one test or world to another
    exec(source.replace(right, wrong), function.__globals__, made)
    function.__code__ = made[function.__name__].__code__
    yield
    function.__code__ = code


# %%
@on_ranks(2)
def two_engines() -> None:
    for engine, name in {"A": "no reduction", "B": "no mistake"}.items():
        with mistake(name):
            losses = train(sharded(CASES["gpt"]), CASES["gpt"], steps=6)
        print(engine, *(f"{loss:.3f}" for loss in losses))


# %% [markdown]
# It is A. After each backward a rank of A takes a chunk of its own gradient where it should have
# taken a chunk of the mean of all gradients. So one half of the model learns from the data of rank
# 0 alone, and the other half from that of rank 1. Gradient descent forgives that, as it forgave a
# missing mean on page [00](00_ddp.md). So a loss that falls says nothing about whether the ranks
# train together.
#
# ## Compare with what is right
#
# What should the numbers be? There is something that knows: DDP, PyTorch's own, trained from the
# same seed on the same data. Sharding says where numbers are kept, and should not change them. So
# after some steps all losses and all parameters must be the same as DDP's. This is called *parity*.
# The test below does it in four lines, with functions of the project's own tests (`reference`
# trains DDP; they are in [tests/parity.py](../tests/parity.py) and need pytest).
#
# But is the test any good? You find out by making mistakes on purpose, and looking whether it
# notices. Such a mistake is called a *mutant*. Here each is a function of the engine, a piece of
# its source, and what to put there instead (`mistake`, in [the program](24_parity.py), does that).
# The first one makes engine A. The last one is a mistake in the test itself:


# %%
def gap(name: str, strategy: str = "FULL_SHARD") -> float:
    losses, parameters = reference(name)  # DDP's
    model = sharded(CASES[name], sharding_strategy=ShardingStrategy[strategy])
    ours = *train(model, CASES[name]), *full_parameters(model).values()
    return max(map(difference, ours, (*losses, *parameters.values())))


MISTAKES = {
    "no reduction": (comm.collectives.reduce_scatter, "add_(part, alpha=scale)", "copy_(part)"),
    "a sum of replicas, not a mean": (halves.FirstHalf.launch, "1 / replicas.size()", "1.0"),
    "padding comes first": (shard.shard, "shard[:unpadded]", "shard[size - unpadded :]"),
    "overwrites what is there": (reduce.store_gradient, "before.add_(grad)", "grad"),
    "computes too early": (unshard.wait_for_unshard, "unit.unshard_event.wait()", "pass"),
    "same data on every rank": (train, "+ dist.get_rank()", ""),
}


@on_ranks(2)
def engine_a() -> None:
    for test in ("same data on every rank", "other data on every rank"):
        with mistake("no reduction"), mistake(test):
            print(f"{test}: {gap('gpt'):.2g} from DDP")


# %% [markdown]
# ## What breaks without different data on every rank
#
# It is tempting to give all ranks the same batch, because then one process can compute what should
# come out. On the same data engine A passes in every bit. The mean of two equal gradients is that
# gradient, so an engine that does not reduce misses nothing. Such a test cannot see the worst
# mistake that there is.
#
# On different data the test does find A, but look at the number. After three steps the parameters
# are not yet far from the right ones. A test with a tolerance, one that calls a difference of a
# hundredth "close enough", lets A through again. (For some of the models below a thousandth is
# enough.) So how close is close? Additions of floating-point numbers round, but `a + b` and `b + a`
# round to the same bits. With two ranks a mean has one addition, so nothing but a difference of
# zero will do. With three ranks it matters which two are added first: `0.1 + 0.2 + 0.3` is
# 0.6000000000000001, and `0.3 + 0.2 + 0.1` is 0.6. Only there is a bound fair, and it can be
# computed from the number of additions (`BOUND` in tests/parity.py says how).
#
# ## Every strategy, and every kind of model
#
# One model is not enough either. Each column below is a small model with something that may go
# wrong: a layer that is called twice, one that is not used in this step, one that is frozen, and so
# on. Each row is a strategy. A box is green if training under minifsdp gives the same bits as under
# DDP, and otherwise it says how large the difference is:
#
# ![Four charts, each with three strategies as rows and six models as columns. Without a mistake all
# 18 boxes are green. With no reduction all are red. With a sum of replicas the rows no_shard and
# hybrid_shard are red. With padding in front only two boxes of full_shard are red.](24_parity.svg)
#
# No two mistakes make the same boxes red. The one in the all-reduce shows only where there are
# replicas. (On two ranks `hybrid_shard` is two machines of one GPU, so it has replicas, as
# `no_shard` has.) The one in the padding shows only in two of the six models, those with a unit
# that has an odd number of elements; the others need no padding on two ranks. Had you tested the
# GPT with `full_shard` alone, two of the three mistakes would have passed. The project's own
# tests have thousands of such boxes.
#
# ## Every program
#
# The fourth mistake, "overwrites what is there", is green everywhere. The gradient of a second
# backward replaces that of the first one, and none of the tests above calls backward twice before a
# step. Somebody has to think of that, and of everything else that a user might do. Or nobody has
# to: a *fuzzer* makes up tests at random. [tests/fuzz.py](../tests/fuzz.py) makes up a model, its
# settings, and a program of operations (forward, backward, step, clear the gradients, save, ...).
# It runs them under minifsdp and under a plain reference, and compares after each operation. The
# same seed makes up the same program, so that what has failed can be run again. This one fails:


# %%
@on_ranks(2)
def a_random_program() -> None:
    fuzz.check(seed=5)
    with mistake("overwrites what is there"), pytest.raises(fuzz.Differs) as found:
        fuzz.check(seed=5)
    print(found.value)


# %% [markdown]
# ## Every wait
#
# The fifth mistake computes with parameters before their gather has been waited for. That is a race
# (page [09](09_streams.md)), and on a CPU the data may have arrived in time by chance. A test that
# passes by chance proves nothing. So the tests bring a device on which nothing happens until
# somebody waits for it. Work that is submitted is only put into a queue, and memory that it has yet
# to fill contains NaN, "not a number":
#
# {{ tests/lagging.py DeferringStream.submit }}
#
# {{ tests/lagging.py DeferringStream.advance }}
#
# An event has the number of work items before it as its `mark`, and waiting for it calls `advance`.
# A program that waits for everything it reads gets the same numbers as always. One that forgets to
# wait computes with NaN, every time. The virtual GPU can tell, too: it notes who writes and who
# reads each piece of memory, and reports a read that is not ordered after the write.


# %%
@on_ranks(2)
def deferring() -> None:
    with lagging.deferring_device(), mistake("computes too early"):
        losses = train(sharded(CASES["gpt"]), CASES["gpt"])
    print("losses on that device:", *map(float, losses))


def virtual_gpu(name: str = "computes too early") -> list:
    with cluster(kind="cpu") as gpu, mistake(name):
        train(sharded(CASES["twice"]), CASES["twice"])
    print(*gpu.races()[:1])
    return gpu.races()


# %% [markdown]
# So five mistakes took four kinds of test: different data on each rank, many models and strategies,
# random programs, and devices on which a missing wait shows. `make mutants` does for the whole
# project what this page did with six: it makes more than 1,000 mistakes, one at a time, and for
# each a test has to fail. A test that no mistake can make fail is worth nothing.
#
# ## Predict, then run
#
# 1. The picture is made on two ranks. On one rank, how many of its boxes are red?
# 2. Does the virtual GPU notice the fourth mistake, "overwrites what is there"?
# 3. You compare with DDP after the first forward only, before any backward. Which of the six
#    mistakes can show in its loss?
#
# <details><summary>Answers</summary>
#
# 1. None. With one rank there is nobody whose gradient could be missed, the sum of one replica is
#    its mean, and nothing is padded.
# 2. No. All waits are where they should be. It sees who reads what and when, and not which numbers.
# 3. Padding that comes first, and computing too early. They spoil the parameters that the forward
#    uses. The first, the second and the fourth spoil gradients, and the sixth is in the data, which
#    is then the same for DDP.
#
# </details>


# %% [hidden]
@on_ranks(2)
def first_losses():
    case, equal = CASES["odd"], []
    for name in MISTAKES:
        lags = lagging.deferring_device() if name == "computes too early" else nullcontext()
        with mistake(name):
            (expected,), _ = reference("odd", steps=1)
            with lags:
                equal.append(torch.equal(train(sharded(case), case, steps=1)[0], expected))
    return equal


def answers() -> None:
    (rows,) = on_ranks(1)(cells.body)()
    assert "'red'" not in str(rows)  # 1. nothing: there is nobody to disagree with
    assert not virtual_gpu("overwrites what is there")  # 2. no: it sees waits, not numbers
    found, _ = first_losses()
    assert found == [True, True, False, True, False, True]  # 3. the third and the fifth


# %% [hidden]
@on_ranks(2)
def cells():
    rows = [("", [(1.0, "", name) for name in MODELS.values()])]
    for name in ("no mistake", *list(MISTAKES)[:3]):
        rows.append((name, []))
        with mistake(name):
            for strategy in ("full_shard", "no_shard", "hybrid_shard"):
                gaps = [gap(model, strategy.upper()) for model in MODELS]
                boxes = [(1.0, "red" if g else "green", f"{g:.0e}" if g else "=") for g in gaps]
                rows.append((strategy, boxes))
    return rows


def matrix():
    rows, _ = cells()
    legend = {"green": "equal to DDP in every bit", "red": "the largest difference from DDP"}
    title = "Training under minifsdp compared with DDP, without and with mistakes"
    strips(Path(__file__).with_suffix(".svg"), title, rows, legend)
    red = [[b[1] == "red" for b in boxes] for name, boxes in rows if name.endswith("shard")]
    assert [sum(row) for row in red] == [0, 0, 0, 6, 6, 6, 0, 6, 6, 2, 0, 0]  # 18 in the first


def main() -> None:
    for page in (two_engines, engine_a, matrix, a_random_program, deferring, virtual_gpu, answers):
        page()
    assert len(MUTANTS) > 1000 and 6 * 3 == 18


if __name__ == "__main__":
    main()
