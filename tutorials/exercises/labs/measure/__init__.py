"""What is looked at in each lab: a file each, with its checks in ``CHECKS``.

A check yields observations, as those of exercises do. The run with the default engine says what is
expected. One observation is the lab's figure, and is not compared.
"""

from typing import Any

from tutorials.exercises.observe import Seen, at_most

FIGURE = "the figure"


def figure(value: float) -> Seen:
    """The lab's figure, in the unit that labs.toml names."""
    return Seen(FIGURE, value)


def on_gpu(gpu: Any, time_slack: float = 0.01) -> list[Any]:
    """What has to hold in every lab on the virtual GPU.

    Args:
        gpu: the virtual GPU that steps have run on.
        time_slack: how much longer than with the default engine a step may take, as a part of it.
    """
    figures = gpu.report()
    return [
        ("races", [str(race) for race in gpu.races()][:1]),
        at_most("seconds of a step", figures["step"], time_slack),
        # Of the reductions too: what is not sent takes no time.
        ("floating point operations of a step", figures["flops"]),
    ]


def because(what: str, want: Any, got: Any) -> str | None:
    """The likely mistake behind what all labs look at."""
    if isinstance(got, dict) and "raised" in got:
        if "world group map" in got["message"]:
            return "these groups are of another run, which is over: keep them in self"
        return None  # what comes next was not looked at
    if "wrong unit" in what:
        return (
            "the target's backward is over, or it was gathered already and is_sound() was asked, "
            "which counts each time that it says no: look at unit.state.sharded instead"
        )
    if what == "races":
        return "memory is used, or given away, before the stream that works on it was waited for"
    if what == "seconds of a step":
        return "something waits that did not wait before: see gpu.timeline('step.svg')"
    if "loss" in what or "parameter" in what:
        return "the values are wrong, whatever the figure is"
    return None
