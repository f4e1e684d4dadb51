"""``cluster.json``: constants of a machine, as ``calibrate`` and ``cluster`` write and
``--cluster`` reads them.

::

    {"format": 2, "minifsdp": "0.1.0", "about": "2 ranks on cpu, torch 2.13.0",
     "gpu": {"name": "cpu", "memory": 16800000000, ...},
     "cluster": {"gpus_per_node": 2, "launch": 2.1e-05, ...}}

``gpu`` has all fields of :class:`minifsdp.sim.hardware.gpus.Gpu`. ``cluster`` has those of
:class:`minifsdp.sim.hardware.costs.Cluster` that are about one node. What is between nodes cannot
be measured on one, so those of :data:`BETWEEN` are there if the file was written from a preset. The
file may have been edited by hand, so each field is looked at. No torch in here: files are looked at
before torch is imported.
"""

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from minifsdp import __version__
from minifsdp.sim.hardware.gpus import Gpu

FORMAT = 2
TEXTS, FLAGS = ("name",), ("prefers_cudnn", "host_computes")
WHOLE = ("memory", "multiprocessors", "tile", "gpus_per_node", "taken", "nodes")
MAY_BE_ZERO = ("tile_overhead", "row_overhead", "taken", "kernel", "launch", "moment", "alpha_node",
               "alpha_network", "cuda_malloc", "cuda_free", "error")  # fmt: skip
SHARES = ("beside_collectives",)
CLUSTER = (
    "gpus_per_node", "alpha_node", "beside_collectives", "host_memory", "taken", "kernel", "launch",
    "moment", "cuda_malloc", "cuda_free", "host_computes",
)  # fmt: skip
"""Constants of a cluster that are in the file. Times are in seconds, sizes in bytes."""
BETWEEN = ("nodes", "network", "alpha_network")
"""Constants of what is between nodes, which may be in the file."""

Constants = dict[str, Any]


def content(gpu: Gpu, constants: Constants, about: str) -> str:
    """A file for :func:`read`.

    Args:
        constants: each of :data:`CLUSTER`, and perhaps those of :data:`BETWEEN`.
        about: where they are from, for people.
    """
    head = {"format": FORMAT, "minifsdp": __version__, "about": about}
    return json.dumps({**head, "gpu": asdict(gpu), "cluster": constants}, indent=1) + "\n"


def read(path: str | Path) -> tuple[Gpu, Constants]:
    """A GPU, and the constants around it: those of :data:`CLUSTER`, and what there is of
    :data:`BETWEEN`.

    Raises:
        ValueError: there is no such file, it is not of this kind or version, or a field is missing
            or makes no sense.
    """
    where = f"--cluster: {str(path)!r}"
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(
            f"--cluster: cannot read {str(path)!r}: {error.strerror}; minifsdp calibrate "
            f"-o FILE makes one, and minifsdp cluster prints one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON; minifsdp calibrate makes one") from error
    if not isinstance(found, dict) or not {"format", "minifsdp"} <= found.keys():
        raise ValueError(f"{where} is no cluster file, as minifsdp calibrate writes")
    for what, own in (("format", FORMAT), ("minifsdp", __version__)):
        if found[what] != own:
            raise ValueError(
                f"{where} is of {what} {found[what]!r}, and this is {own!r}; calibrate again"
            )
    gpu = _checked(where, found, "gpu", [field.name for field in fields(Gpu)])
    return Gpu(**gpu), _checked(where, found, "cluster", list(CLUSTER), BETWEEN)


def _checked(
    where: str, found: dict[str, Any], part: str, names: list[str], more: tuple[str, ...] = ()
) -> Constants:
    """A part of the file, if it has all of its fields, no others but ``more``, and each makes
    sense."""
    values = found.get(part)
    if not isinstance(values, dict):
        raise ValueError(f"{where} has no {part!r} with constants in it; calibrate again")
    for name in names:
        if name not in values:
            raise ValueError(f"{where} lacks {part}.{name}; calibrate again")
    for name, value in values.items():
        if name not in (*names, *more):
            raise ValueError(f"{where} has {part}.{name}, which is not known; calibrate again")
        expected = _problem(name, value)
        if expected:
            raise ValueError(f"{where}: {part}.{name} should be {expected}, and is {value!r}")
    return values


def _problem(name: str, value: Any) -> str:
    """What a value should have been; "" if it is all right."""
    if name in TEXTS:
        return "" if isinstance(value, str) else "a name"
    if name in FLAGS:
        return "" if isinstance(value, bool) else "true or false"
    kind: Any = int if name in WHOLE else (int, float)
    zero = name in MAY_BE_ZERO
    right = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    right = right and (value >= 0 if zero else value > 0)
    if name in SHARES:
        return "" if right and value <= 1 else "a number above 0 and at most 1"
    what = "a whole number" if name in WHOLE else "a number"
    return "" if right else f"{what} {'of at least' if zero else 'above'} 0"
