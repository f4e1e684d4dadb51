"""What units a model has: a table, and a warning where one of them is most of the model.

How a model is cut into units decides how much memory it needs and how much of its communication is
hidden (tutorials/07_unit.md). It is easily seen and rarely looked at::

    >>> minifsdp.explain(model)
    unit   parameters   this rank   gathered  computed in  cut in  shared by
    <root>      1,088     2.1 KiB    4.2 KiB  float32      chunks  2 ranks
    1          33,472    65.4 KiB  130.8 KiB  float32      chunks  2 ranks
    in all     34,560    67.5 KiB
"""

from torch import nn

from minifsdp.featured_unit import FeaturedUnit
from minifsdp.wrapping.module_tree import ignored_params, unit_of

HEADS = ("unit", "parameters", "this rank", "gathered", "computed in", "cut in", "shared by")
MOST = 0.5
"""A sharded unit that has more than this share of all parameters gets a warning."""


def explain(model: nn.Module) -> None:
    """Print a line for each unit: how many parameters it has, the bytes of this rank's shard, those
    that are allocated while it is gathered, the dtypes to compute in, whether it is cut in chunks
    (shard.py) or in rows (rows.py), and the ranks that share it. Another line counts parameters
    that are in no unit because they are ignored (wrapping/ignored.py). For each unit that is
    gathered now, a line says why it stays (unit_state.py). No rank waits for another.

    Args:
        model: a wrapper or what fully_shard was called on, or a module with such modules inside.

    Raises:
        ValueError: there is no FullyShardedDataParallel at or below ``model``.
    """
    print(table(model))


def table(model: nn.Module) -> str:
    """What :func:`explain` prints."""
    found = dict.fromkeys(unit_of(module) for module in model.modules())  # each once
    units = [unit for unit in found if unit is not None and unit.numel]
    if not units:
        raise ValueError(
            f"{type(model).__name__} has no sharded parameters: there is no "
            f"FullyShardedDataParallel with parameters at or below it."
        )
    total = sum(unit.numel for unit in units)
    held = sum(unit.padded_shard.nbytes for unit in units)
    rows = [HEADS, *map(_row, units), ("in all", f"{total:,}", _bytes(held), "", "", "", "")]
    if ignored := ignored_params(model):
        numel, held = sum(p.numel() for p in ignored), sum(p.nbytes for p in ignored)
        rows.append(("ignored", f"{numel:,}", _bytes(held), "", "", "", "each rank by itself"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(_aligned, row, widths, range(len(row)))).rstrip() for row in rows]
    largest = max(units, key=lambda unit: unit.numel)
    if largest.numel > MOST * total and largest.shard_world_size > 1:
        lines.append(_warning(largest, total))
    lines += [
        f"Unit {unit.label} is held now, for {' and '.join(sorted(unit.reasons))}."
        for unit in units
        if unit.reasons
    ]
    return "\n".join(lines)


def _row(unit: FeaturedUnit) -> tuple[str, ...]:
    kept = unit.padded_shard.dtype
    low = unit.precision.param_dtype if kept.is_floating_point else None
    computed_in = low or kept
    layout = unit.layout if unit.mixed is None else unit.mixed.computed_in(low)
    gathered = layout.padded_numel * computed_in.itemsize
    dtypes = dict.fromkeys((computed_in, *getattr(layout, "dtypes", ())))
    sharers = f"{unit.shard_world_size} rank{'s' * (unit.shard_world_size > 1)}"
    if unit.replicate_group is not None:
        sharers += f", {unit.replicate_group.size()} replicas"
    if unit.shard_world_size > 1 and not unit.reshard_after_forward:
        sharers += ", stays after forward"
    if unit.post_forward_lines is not None:
        sharers += f", {len(unit.post_forward_lines[0])} after forward"
    return (
        unit.name or "<root>", f"{unit.numel:,}", _bytes(unit.padded_shard.nbytes),
        _bytes(gathered) if unit.shard_world_size > 1 or low or unit.offload_from else "as it is",
        ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
        "rows" if unit.mesh is not None else "chunks",
        sharers,
    )  # fmt: skip


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if 1 <= column <= 3 else cell.ljust(width)


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:,.1f} {unit}" if unit != "B" else f"{number} B"
        number /= 1024
    return f"{number:,.1f} GiB"


def _warning(unit: FeaturedUnit, total: int) -> str:
    return (
        f"Unit {unit.label} has {unit.numel / total:.0%} of the parameters. While it is gathered, "
        f"so is most of the\nmodel, and there is little to gather while something else computes. "
        f"Make a unit of each block:\nFSDP(model, auto_wrap_policy=ModuleWrapPolicy({{Block}}))."
    )
