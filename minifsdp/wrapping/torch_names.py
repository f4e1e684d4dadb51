"""Arguments that are objects of torch's FSDP, translated to minifsdp's.

A script that is moved to minifsdp changes one import. Another file of it, or a library, may still
pass objects from ``torch.distributed.fsdp``. They are taken to mean the same::

    torch.distributed.fsdp.ShardingStrategy.FULL_SHARD     minifsdp.ShardingStrategy.FULL_SHARD
    torch.distributed.fsdp.MixedPrecision(param_dtype=d)   minifsdp.MixedPrecision(param_dtype=d)
    torch's CustomPolicy(f)                                minifsdp.CustomPolicy(f)

They are recognized by the names of their classes. Nothing here imports torch's FSDP, which takes a
while: a program that has one of these objects has imported it already.
"""

from dataclasses import fields
from enum import Enum
from functools import partial
from typing import Any

from minifsdp.api import CPUOffload, MixedPrecision
from minifsdp.core.api import BackwardPrefetch, ShardingStrategy
from minifsdp.wrapping.policies import CustomPolicy, always_wrap_policy

TYPES = {c.__name__: c for c in (BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy)}


def from_torch(given: Any) -> Any:
    """minifsdp's enum member, record or policy for ``given``, an object of torch's FSDP. Any other
    object is returned as it is.

    Raises:
        TypeError: a newer torch has a member or a field that minifsdp does not have.
    """
    if isinstance(given, partial):  # partial(size_based_auto_wrap_policy, min_num_params=...)
        return partial(from_torch(given.func), *given.args, **given.keywords)
    kind = given if callable(given) and hasattr(given, "__name__") else type(given)
    for cls in (kind, *getattr(kind, "__mro__", ())):  # an object of a subclass means the same
        module, name = getattr(cls, "__module__", None), getattr(cls, "__name__", "")
        if module == "torch.distributed.fsdp.wrap":
            return _policy(given, name)
        if module == "torch.distributed.fsdp.api" and name in TYPES:
            return _enum_or_record(given, TYPES[name])
    return given


def _policy(given: Any, name: str) -> Any:
    if name == "CustomPolicy":
        return CustomPolicy(given._lambda_fn)  # torch's cannot be called as a function
    if name == "always_wrap_policy":
        return always_wrap_policy  # torch's wraps containers, too, which are never gathered
    return given  # torch's functions and ModuleWrapPolicy are called as minifsdp's are


def _enum_or_record(given: Any, ours: Any) -> Any:
    if issubclass(ours, Enum):
        if given.name not in ours.__members__:
            raise TypeError(f"minifsdp.{ours.__name__} has no {given.name}, as torch's {given!r}")
        return ours[given.name]
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    for field in fields(given):
        if field.name not in ours.__dataclass_fields__ and values.pop(field.name) != field.default:
            raise TypeError(
                f"minifsdp.{ours.__name__} has no {field.name}, as torch's {given!r} has. Leave it "
                f"at its default, {field.default!r}."
            )
    return ours(**values)
