"""Attributes that a program has given to its parameters, and reads when it makes parameter groups::

    for p in model.norm.parameters():
        p.no_decay = True
    model = FSDP(model)
    groups = [p for p in model.parameters() if not getattr(p, "no_decay", False)], ...

Without them the program would make other groups than before, and nothing would fail.

    rows      each DTensor has the attributes of its parameter
    chunks    the flat parameter has those that are equal for all parameters of its unit; others are
              warned of
"""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.support.param_access import ParamInfo

# What torch, transformers and this package write to parameters, and no program asks for.
_MARKS = ("_minifsdp_unit", "minifsdp_unit", "_is_hf_initialized", "_is_param")
_PREFIXES = ("_dynamo_", "_fsdp_")
_MISSING = object()


def attributes_of(param: nn.Parameter) -> dict[str, Any]:
    """What a program has set on a parameter. For a subclass, which has its own, nothing."""
    given = vars(param) if type(param) in (nn.Parameter, DTensor) else {}
    return {
        name: value
        for name, value in given.items()
        if name not in _MARKS and not name.startswith(_PREFIXES)
    }


def common_attributes(infos: Sequence[ParamInfo]) -> dict[str, Any]:
    """The attributes that all parameters of a unit have, with the same value."""
    attributes = infos[0].attributes if infos else {}
    return {n: value for n, value in attributes.items() if _is_common(n, infos)}


def warn_of_lost_attributes(infos: Sequence[ParamInfo]) -> None:
    """Warn of the attributes that the flat parameter of these parameters cannot have, because they
    differ. The text is the same for units that are alike, so Python shows it once.

    Warns:
        UserWarning: naming the attributes, and a parameter with and one without each.
    """
    names = dict.fromkeys(name for info in infos for name in info.attributes)
    lost = [name for name in names if not _is_common(name, infos)]
    if not lost:
        return
    found = []
    for name in lost:
        values = [info.attributes.get(name, _MISSING) for info in infos]
        first = next(info for info in infos if name in info.attributes)
        other = next(
            info
            for info, value in zip(infos, values, strict=True)
            if not _equal(value, first.attributes[name])
        )
        value = other.attributes.get(name, _MISSING)
        differs = f"{value!r}" if value is not _MISSING else "none"
        found.append(
            f"{name!r} ({first.name!r} has {first.attributes[name]!r}, {other.name!r} has "
            f"{differs})"
        )
    warnings.warn(
        f"parameters that become one flat parameter differ in attributes that a program has given "
        f"to them: {'; '.join(found)}. The flat parameter has none of these, so whoever chooses "
        f"parameters by them (for parameter groups, say) would choose other ones than before. With "
        f"use_orig_params=True each parameter keeps its attributes. Or wrap in units of their own "
        f"what should differ: a flat parameter has the attributes that are equal for all of its "
        f"unit.",
        stacklevel=2,
    )


def _is_common(name: str, infos: Sequence[ParamInfo]) -> bool:
    first = infos[0].attributes.get(name, _MISSING)
    return all(_equal(info.attributes.get(name, _MISSING), first) for info in infos)


def _equal(one: object, other: object) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # of two tensors, say
        return False
