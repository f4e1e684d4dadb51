"""``--against``: the memory of a run at its peak, beside that of a snapshot."""

from minifsdp.sim.memory.snapshots import Peak

RULE = """\
Memory when most of it was allocated, as far back as the histories go, by the innermost line of
Python that tells what it was asked for. In MiB: in the file, in this run, and their ratio."""


def table(there: Peak, here: Peak) -> str:
    """Both, by category.

    Args:
        there: of the file.
        here: of the run.
    """
    rows = [
        _row("reserved then", there.reserved, here.reserved),
        _row("allocated then", there.allocated, here.allocated),
    ]
    for name in dict.fromkeys((*here.asked, *there.asked)):
        rows.append(_row(f"  {name}", there.asked.get(name, 0), here.asked.get(name, 0)))
    return "\n".join([RULE, f"{'':32} {'file':>10} {'run':>10} {'ratio':>8}", *rows])


def _row(what: str, there: int, here: int) -> str:
    ratio = f"{here / there:8.2f}" if there else ""
    return f"{what:32} {there / 2**20:10,.1f} {here / 2**20:10,.1f} {ratio}".rstrip()
