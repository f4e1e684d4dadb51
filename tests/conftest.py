"""What `make test` leaves out, what this machine cannot run, and how that is told at the end."""

import functools
import gc
import itertools
import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.gpus import SHARED, why_on_cpu, workers_that_fit
from tests.replace import replacements

WORKER = 1 << 30  # bytes that a worker and its ranks take


def pytest_report_header():
    return [f"replaced: {name} by {file}" for name, file in replacements().items()]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """For `-n auto`: one worker for each core, and one more, since some tests wait most of the
    time, for a deadlock to be found or for a new Python. But no more than eight, and no more than
    there is memory for: each of them keeps the ranks of four worlds, in about a gigabyte."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fitting = max(1, memory // WORKER - 1)  # the rest is for the system
    if torch.cuda.device_count():
        fitting = min(fitting, workers_that_fit(torch.cuda.get_device_properties(0).total_memory))
    return min((cores or 1) + 1, fitting, 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """All tests of a file that is marked with `xdist_group` go to one worker, others to whichever
    is free. So does pytest-xdist by itself, but not with pytest 9.2 (its issue 1386), and it hangs
    if a worker dies."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(config.rootpath / nodeid.partition("::")[0]) or nodeid

        def remove_node(self, node):
            """A worker has ended or died. Others run the tests that it has left, but for the one in
            which it died. pytest-xdist 3.8 has them run that one again, and hands out what is done
            as well. No worker reports that a second time, so it waits for ever."""
            units = self.assigned_work[node]
            left = [(unit, test) for unit in units.values() for test in unit if not unit[test]]
            for unit, test in left[:1]:
                unit[test] = True
            self.assigned_work[node] = {
                scope: unit for scope, unit in units.items() if not all(unit.values())
            }
            super().remove_node(node)
            return left[0][1] if left else None

        def schedule(self):
            """Share out the first tests; and again when a worker takes the place of one that has
            died. A worker runs a test as soon as it knows the next one, or that there is none.
            xdist gives the new worker one test, and may never tell it either."""
            super().schedule()
            for node in self.nodes:
                self._reschedule(node)

    return ByGroups(config, log)


@functools.cache
def group_of(path: Path) -> str:
    """The name in its mark, or nothing. The process that distributes tests imports none of them."""
    mark = re.search(r'^pytestmark = pytest\.mark\.xdist_group\("(.*?)"\)', path.read_text(), re.M)
    return mark[1] if mark else ""


def pytest_collection_finish():
    """What is there before the first test is no garbage: do not look for any in it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items):
    """Where parameters of a test are combined, most of the combinations are `slow`, and of a test
    that is marked `few(n)` all but n."""
    families = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            families[item.parent, item.originalname].append(item)
    for family in families.values():
        kept = representative(family) if len(family[0].callspec.params) > 1 else family
        if few := family[0].get_closest_marker("few"):
            kept = kept[: few.args[0]]
        for item in set(family) - set(kept):
            item.add_marker("slow")


def representative(family: list[pytest.Function]) -> list[pytest.Function]:
    """As few parametrisations of a test as let each value of each parameter occur in one of them;
    of several that would do, those with the values that have occurred least."""
    values = {item: [*map(repr, item.callspec.params.items())] for item in family}
    occurred = Counter(dict.fromkeys(itertools.chain(*values.values()), 0))
    kept = []
    while not all(occurred.values()):
        new = {item: sum(not occurred[value] for value in values[item]) for item in family}
        known = {item: sum(occurred[value] for value in values[item]) for item in family}
        kept.append(max(family, key=lambda item: (new[item], -known[item])))
        occurred.update(values[kept[-1]])
    return kept


def pytest_runtest_setup(item):
    ranks.on_cpu = why_on_cpu(item.nodeid) is not None
    for marker in item.iter_markers("gpus"):
        needed, found = marker.args[0], torch.cuda.device_count()
        if found < (min(needed, 1) if SHARED else needed):
            pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, this machine has {found}")


# ------------------------------------------------------------------------------- what was left out

left_out = pytest.StashKey[set[str]]()


def pytest_configure(config):
    config.stash[left_out] = set()


def pytest_deselected(items):
    for item in items:
        item.config.stash[left_out].add(item.nodeid)


def pytest_sessionfinish(session):
    """A worker of pytest-xdist tells the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = sorted(session.config.stash[left_out])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """All workers have left out the same tests."""
    node.config.stash[left_out].update(getattr(node, "workeroutput", {}).get("left_out", ()))


def pytest_terminal_summary(terminalreporter, config):
    gpus = torch.cuda.device_count()
    lines = []
    if gpus == 0:
        lines.append("the CUDA stream path and NCCL: no GPU here (ranks ran on gloo, on the CPU)")
    elif SHARED:
        lines.append(f"NCCL between more than {gpus} GPUs (ranks shared {gpus}: SHARE_GPUS)")
    elif gpus < 4:
        lines.append(f"NCCL with more than {gpus} ranks (those worlds ran on gloo, on the CPU)")
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    lines += [
        f"{count} tests: {reason.removeprefix('Skipped: ')}" for reason, count in skipped.items()
    ]
    if config.stash[left_out]:
        lines.append(f"{len(config.stash[left_out])} tests: {why_left_out(config)}")
    for name, file in replacements().items():
        terminalreporter.write_line(f"{name} was {file}")
    terminalreporter.section("not run")
    for line in lines or ["nothing: everything ran"]:
        terminalreporter.write_line(f"- {line}")


def why_left_out(config) -> str:
    if config.option.markexpr == "not slow" and not config.option.keyword:
        return "left out by `make test`; `make test-all` runs them"
    chosen = {"-m": config.option.markexpr, "-k": config.option.keyword}
    return "left out by " + " and ".join(f"{o} {value!r}" for o, value in chosen.items() if value)
