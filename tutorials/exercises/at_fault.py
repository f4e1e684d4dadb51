"""Which file is at fault, where each of a student's functions is right and all together are not.

The student's files are changed for the reference's, half of those that are suspected at a time. If
that makes the check right, what was wrong is among them.
"""

from pathlib import Path

from tutorials.exercises.catalog import Check
from tutorials.exercises.court import Court
from tutorials.exercises.inside import Job
from tutorials.exercises.overlay import Layer
from tutorials.exercises.sandbox import run_all


def file_at_fault(
    check: Check,
    layers: dict[str, Layer],
    folder: Path,
    seed: int,
    patience: float,
    workers: int,
    keep: bool,
) -> str:
    """What to tell the student, in a sentence.

    Args:
        check: it is wrong with all layers.
        layers: the student's files, by the module that they are laid over.
        folder, seed, patience, workers, keep: as in grade().
    """

    def is_right_without(modules: list[str]) -> bool:
        rest = {name: layer for name, layer in layers.items() if name not in modules}
        with Court([check], seed, patience, workers, keep) as court:
            return all(
                court.verdict(check, report).state == "right"
                for _, report in run_all([Job(check, rest, folder, seed)], workers, patience)
            )

    suspects = list(layers)
    while len(suspects) > 1:
        half, rest = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        if is_right_without(half):
            suspects = half
        elif is_right_without(rest):
            suspects = rest
        else:
            return "No single file of yours is at fault: two or more have a part in it."
    name = layers[suspects[0]].file.name
    return f"With the reference's {name} in the place of yours it is right: look there."
