"""torch's own words, said as minifsdp's.

A script that is moved here changes one import. Another file of it, or a library, may still hand
over ``torch.distributed.fsdp.ShardingStrategy.FULL_SHARD``, a ``MixedPrecision`` or a policy from
there. They say the same, so they are taken by name and by value. Nothing here imports torch's FSDP:
whoever has one of its objects has done so.
"""

from dataclasses import fields
from enum import Enum
from functools import partial
from typing import Any

from minifsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.wrapping.policies import CustomPolicy, always_wrap_policy

WORDS = {c.__name__: c for c in (BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy)}


def as_ours(given: Any) -> Any:
    """The enum member, record or policy of minifsdp that says what ``given`` of torch's says.
    Whatever is none of torch's FSDP is returned as it is.

    Raises:
        TypeError: a newer torch has a member or a field that minifsdp does not know.
    """
    if isinstance(given, partial):  # partial(size_based_auto_wrap_policy, min_num_params=...)
        return partial(as_ours(given.func), *given.args, **given.keywords)
    kind = given if callable(given) and hasattr(given, "__name__") else type(given)
    for cls in (kind, *getattr(kind, "__mro__", ())):  # a subclass says what its base says
        module, name = getattr(cls, "__module__", None), getattr(cls, "__name__", "")
        if module == "torch.distributed.fsdp.wrap":
            return _policy(given, name)
        if module == "torch.distributed.fsdp.api" and name in WORDS:
            return _word(given, WORDS[name])
    return given


def _policy(given: Any, name: str) -> Any:
    if name == "CustomPolicy":
        return CustomPolicy(given._lambda_fn)  # torch's is no function that could be called
    if name == "always_wrap_policy":
        return always_wrap_policy  # torch's asks for containers, too
    return given  # torch's functions and ModuleWrapPolicy take what minifsdp's take


def _word(given: Any, ours: Any) -> Any:
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
