"""Skip what this machine cannot run, and say at the end what that was."""

from collections import Counter

import pytest
import torch

from tests.replace import replacements


def pytest_runtest_setup(item):
    for marker in item.iter_markers("gpus"):
        needed, found = marker.args[0], torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, this machine has {found}")


def pytest_terminal_summary(terminalreporter, config):
    gpus = torch.cuda.device_count()
    lines = []
    if gpus == 0:
        lines.append("the CUDA stream path and NCCL: no GPU here (ranks ran on gloo, on the CPU)")
    elif gpus < 4:
        lines.append(f"NCCL with more than {gpus} ranks (those worlds ran on gloo, on the CPU)")
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    lines += [
        f"{count} tests: {reason.removeprefix('Skipped: ')}" for reason, count in skipped.items()
    ]
    deselected = len(terminalreporter.stats.get("deselected", []))
    if deselected:
        lines.append(f"{deselected} tests: left out by -m {config.option.markexpr!r}")
    for name, file in replacements().items():
        terminalreporter.write_line(f"{name} was {file}")
    terminalreporter.section("not run")
    for line in lines or ["nothing: everything ran"]:
        terminalreporter.write_line(f"- {line}")
