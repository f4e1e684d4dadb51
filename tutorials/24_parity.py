"""Parity: python tutorials/24_parity.py; the page is 24_parity.md."""

# %% [markdown]
# # Parity: a loss that falls proves nothing
#
# Here are two sharded engines, A and B, and their losses. Each has trained the same small model on
# two ranks, from the same seed and on the same data. In one of the two engines no rank ever sees a
# gradient of the other rank. Which one?

# %% [hidden]
import inspect
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")
sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/ is beside tutorials/

import pytest
from draw import strips
from launch import on_ranks

from minifsdp import ShardingStrategy, comm, reduce, shard, unshard
from minifsdp.sim import cluster
from tests import fuzz, lagging
from tests.parity import CASES, difference, full_parameters, reference, sharded, train

MODELS = ("mlp_nested", "twice", "unused", "frozen", "conv", "odd")


@contextmanager
def mistake(name):
    function, right, wrong = MISTAKES.get(name, (train, "", ""))
    source, made, code = inspect.getsource(function), {}, function.__code__
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
            losses = train(sharded(CASES["mlp_nested"]), CASES["mlp_nested"], steps=6)
        print(engine, *(f"{loss:.3f}" for loss in losses))


# %% [markdown]
# It is A. Each of its ranks takes a chunk of its own gradient for a chunk of the mean. Gradient
# descent forgives that, as it did on page [00](00_ddp.md). A falling loss proves nothing.
#
# So compare with what is right: DDP, from the same seed, on the same data. After
# three steps all losses and parameters must be the same. This is that test, made from the project's
# own (in `tests/`; they need pytest). A mistake is a function, a piece of its source, and what to
# put there. The first makes engine A.


# %%
def gap(name: str, strategy: str = "FULL_SHARD") -> float:
    losses, parameters = reference(name)  # DDP's
    model = sharded(CASES[name], sharding_strategy=ShardingStrategy[strategy])
    ours = *train(model, CASES[name]), *full_parameters(model).values()
    return max(map(difference, ours, (*losses, *parameters.values())))


MISTAKES = {
    "no reduction": (comm.collectives.reduce_scatter, "add_(addend, alpha=scale)", "copy_(addend)"),
    "a sum of replicas, not a mean": (reduce._start_all_reduce_part, "1 / replicas.size()", "1.0"),
    "padding comes first": (shard.shard, "shard[:unpadded]", "shard[size - unpadded :]"),
    "overwrites what is there": (reduce.store_gradient, "before.add_(grad)", "grad"),
    "computes too early": (unshard.wait_for_unshard, "unit.unshard_event.wait()", "pass"),
    "same data on every rank": (train, "+ dist.get_rank()", ""),
}


@on_ranks(2)
def engine_a() -> None:
    for test in ("same data on every rank", "other data on every rank"):
        with mistake("no reduction"), mistake(test):
            print(f"{test}: {gap('mlp_nested'):.2g} from DDP")


# %% [markdown]
# ## What breaks without other data
#
# It is tempting to give all ranks the same batch. Then A passes in every bit: the mean of two equal
# gradients is that gradient, and who does not reduce misses nothing. On other data A is off, but by
# half a thousandth. A test that calls this close lets it through again.
#
# How close is close? Addition rounds, but `a + b` is `b + a` in every bit: with two ranks nothing
# but zero will do. With three, order matters: `0.1 + 0.2 + 0.3` is 0.6000000000000001, backwards it
# is 0.6. Only there is a bound fair (`tests/parity.py` has one, and why).
#
# ## Every strategy, every kind of model, every program
#
# ![Four groups of strips, a strip for each strategy, in it a box for each of six models. Without a
# mistake all is green. Each of three mistakes is red in other places.](24_parity.svg)
#
# The one thing to notice: each mistake is red in other places. A box compares with DDP, on two
# ranks; a red one says how far off it is. Only where there are replicas the line of the second
# mistake runs (HYBRID_SHARD is two of them here, as NO_SHARD is), and only two of the models have
# an odd number of elements in a unit, which is padded. `make test-all` has thousands of boxes.
#
# The fourth is green in all of them: gradients are cleared after each step, so there is nothing to
# overwrite. Somebody has to think of two backwards before a step. Or nobody: `tests/fuzz.py` makes
# up models, settings and programs, and compares after each operation. Here is one that fails:


# %%
@on_ranks(2)
def a_random_program() -> None:
    fuzz.check(seed=3)
    with mistake("overwrites what is there"), pytest.raises(fuzz.Differs) as found:
        fuzz.check(seed=3)
    print(found.value)


# %% [markdown]
# ## Waits
#
# The fifth mistake computes before the gather has been waited for. On a CPU the data may be there
# by chance. So the tests bring a device on which nothing happens before somebody waits for it, and
# what is to come is NaN. The virtual GPU ([09](09_streams.md)) sees who reads what, not numbers.
#
# {{ tests/lagging.py DeferringStream }}


# %%
@on_ranks(2)
def deferring() -> None:
    with lagging.deferring_device(), mistake("computes too early"):
        losses = train(sharded(CASES["twice"]), CASES["twice"])
    print("losses on that device:", *map(float, losses))


def virtual_gpu(name: str = "computes too early") -> list:
    with cluster(kind="cpu") as gpu, mistake(name):
        train(sharded(CASES["twice"]), CASES["twice"])
    print(*gpu.races()[:1])
    return gpu.races()


# %% [markdown]
# Mistakes test the tests. `make mutants` makes more than three hundred, one at a time, and each has
# to fail a test. One that nothing can fail is worth nothing.
#
# ## Predict, then run
#
# 1. On one rank, how much of the picture is red?
# 2. Does the virtual GPU notice the fourth mistake?


# %%
def answers() -> None:
    (rows,) = on_ranks(1)(cells.body)()
    assert "'red'" not in str(rows)  # 1. nothing: there is nobody to disagree with
    assert not virtual_gpu("overwrites what is there")  # 2. no: it sees waits, not numbers


# %% [hidden]
@on_ranks(2)
def cells():
    rows = [("", [(1.0, "", name) for name in MODELS])]
    for name in ("no mistake", *list(MISTAKES)[:3]):
        rows.append((name, []))
        with mistake(name):
            for strategy in ("full_shard", "no_shard", "hybrid_shard"):
                gaps = [gap(model, strategy.upper()) for model in MODELS]
                boxes = [(1.0, "red" if g else "green", f"{g:.0e}" if g else "=") for g in gaps]
                rows.append((strategy, boxes))
    return rows


def matrix():
    legend = {"green": "equal to DDP in every bit", "red": "the largest difference from DDP"}
    strips(Path(__file__).with_suffix(".svg"), "minifsdp against DDP", cells()[0], legend)


def main() -> None:
    for page in (two_engines, engine_a, matrix, a_random_program, deferring, virtual_gpu, answers):
        page()


if __name__ == "__main__":
    main()
