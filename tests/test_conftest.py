"""conftest.py: which combinations of parameters `make test` runs, and what runs them."""

import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import (
    group_of,
    pytest_collection_modifyitems,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
    representative,
)

ROOT = Path(__file__).parents[1]


def family(*rows, **values):
    """A test's parametrisations: with these rows, or with all combinations of values."""
    rows = rows or [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    return [SimpleNamespace(callspec=SimpleNamespace(params=row)) for row in rows]


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


def kept(items):
    items = [Hashable(callspec=item.callspec) for item in items]
    return [item.callspec.params for item in representative(items)]


def test_each_value_occurs_once_where_it_can():
    found = kept(family(strategy="abcde", ranks=[1, 2, 3, 4], offload=[True, False]))
    assert len(found) == 5
    assert [params["strategy"] for params in found] == list("abcde")
    assert [params["ranks"] for params in found[:4]] == [1, 2, 3, 4]
    assert sorted(params["offload"] for params in found) in (
        [False] * 2 + [True] * 3,
        [False] * 3 + [True] * 2,
    )


def test_a_table_of_cases_is_kept_whole():
    assert len(kept(family(case=range(20)))) == 20
    assert len(kept(family(*({"given": n, "expected": n % 2} for n in range(20))))) == 20


def test_what_is_not_combined_freely_is_covered_too():
    rows = [
        {"strategy": s, "ranks": r} for s, r in [("a", 2), ("a", 3), ("b", 2), ("b", 3), ("c", 4)]
    ]
    assert kept(family(*rows)) == [rows[0], rows[3], rows[4]]


@pytest.mark.parametrize("values, few", [({"case": range(9)}, 4), ({"a": "xyz", "b": [1, 2]}, 2)])
def test_of_cases_that_are_much_alike_a_few_are_kept(values, few):
    class Item(Hashable):
        parent, originalname = "a module", "test_a"

        def get_closest_marker(self, name):
            return SimpleNamespace(args=[few]) if name == "few" else None

        def add_marker(self, name):
            slow.append((self, name))

    slow = []
    items = [Item(callspec=item.callspec) for item in family(**values)]
    pytest_collection_modifyitems(items)
    assert len(slow) == len(items) - few and {name for _, name in slow} == {"slow"}
    assert items[0] not in [item for item, _ in slow]


def scheduler_for(dist):
    """What shares out tests among two workers, with this value of pytest-xdist's --dist."""
    pytest.importorskip("xdist")
    values = {"dist": dist, "tx": ["popen"] * 2, "maxworkerrestart": None}
    option = SimpleNamespace(loadscopereorder=False)
    config = SimpleNamespace(rootpath=ROOT, getvalue=values.get, option=option)
    return pytest_xdist_make_scheduler(config, None)


def test_a_file_that_is_marked_goes_to_one_worker():
    scheduler = scheduler_for("loadgroup")
    tests = [
        f"tests/{name}.py::test_a[{at}]"
        for name in ("test_tutorials", "core/test_unit")
        for at in "01"
    ]
    assert [scheduler._split_scope(test) for test in tests] == ["pictures", "pictures", *tests[2:]]
    assert scheduler_for("load") is None


class Worker:
    """One of pytest-xdist's, which does what it is asked for when it is told to."""

    def __init__(self, scheduler, tests):
        self.gateway, self.shutting_down = SimpleNamespace(id=id(self)), False
        self.scheduler, self.asked, self.ran = scheduler, [], []
        scheduler.add_node(self)
        scheduler.add_node_collection(self, tests)

    def send_runtest_some(self, indices):
        assert indices, "xdist waits for a report of these"
        self.asked += indices

    def shutdown(self):
        self.shutting_down = True

    def works(self, count=10**9):
        """As xdist's does: the last test that it has been asked for waits for what comes next."""
        while len(self.ran) < min(count, len(self.asked) - (not self.shutting_down)):
            self.ran.append(self.asked[len(self.ran)])
            self.scheduler.mark_test_complete(self, self.ran[-1])


@pytest.mark.parametrize("done", range(5))
def test_if_a_worker_dies_others_do_what_it_has_left_and_all_come_to_an_end(done):
    scheduler = scheduler_for("loadgroup")
    tests = [f"tests/core/test_unit.py::test_a[{at}]" for at in range(12)]
    dies, lives = Worker(scheduler, tests), Worker(scheduler, tests)
    scheduler.schedule()
    dies.works(done)
    assert scheduler.remove_node(dies) == tests[dies.asked[done]]  # which has failed
    replaces = Worker(scheduler, tests)
    scheduler.schedule()
    for worker in (lives, replaces, lives):
        worker.works()
    for worker in (lives, replaces):
        assert worker.shutting_down and worker.ran == worker.asked, "it waits for more"
    ran = [*dies.ran, dies.asked[done], *lives.ran, *replaces.ran]
    assert sorted(ran) == [*range(len(tests))]


def test_every_group_is_marked_where_it_is_looked_for():
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.xdist_group(" in path.read_text()
    ]
    assert len(marked) >= 5 and all(map(group_of, set(marked) - {Path(__file__)}))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="counts cores as Linux does")
@pytest.mark.parametrize(
    "cores, gib, on_gpu, workers",
    [(2, 24, 0, 3), (2, 3, 0, 2), (1, 1, 0, 1), (64, 512, 0, 8), (16, 128, 80, 8), (64, 512, 8, 2)],
)
def test_workers_are_as_many_as_cores_and_memory_allow(monkeypatch, cores, gib, on_gpu, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gib << 18}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: bool(on_gpu))
    gpu = SimpleNamespace(total_memory=on_gpu << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert pytest_xdist_auto_num_workers(None) == workers
