"""Calls of methods that are right, but not on this module or not now."""

from minifsdp.unit import Unit


def check_root_and_idle(unit: Unit, root: Unit, idle: bool, method: str) -> None:
    """Refuse a method that concerns all units, between steps.

    Args:
        idle: whether no forward and no backward is running.

    Raises:
        RuntimeError: ``unit`` is not the root's; or a forward or backward is running.
    """
    if unit is not root:
        raise RuntimeError(
            f"{method} was called on unit {unit.label}, which is inside of another. Call it on the "
            f"outermost FullyShardedDataParallel: it concerns all units together."
        )
    if not idle:
        raise RuntimeError(f"{method} was called in a forward or backward; call it between.")
