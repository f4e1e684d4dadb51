"""What torch's FSDP has and minifsdp does not: refused by name, never ignored.

Scripts that were written for ``torch.distributed.fsdp`` pass arguments, call methods and import
names that minifsdp does not have. To ignore an argument would be worse than an error, because the
model would be sharded in a different way than the user asked for::

    model.set_all_reduce_hook(f, stream=s)     NotImplementedError: stream=...
    model.set_all_reduce_hook(f, stream=None)  fine: it asks for nothing
    from minifsdp import LocalStateDictConfig   fine: it may be needed for an annotation only
    LocalStateDictConfig(offload_to_cpu=True)   NotImplementedError

All of this runs when a model is wrapped or a name is used, never in a step.
"""

from collections.abc import Callable, Sized
from typing import Any, NoReturn

NAMES = {
    "FSDPMeshInfo": "a mesh and its groups, as a shard_placement_fn may return it",
    "LocalOptimStateDictConfig": "an optimizer's state as flat shards",
    "LocalStateDictConfig": "a state dict of flat shards",
    "ShardPlacementResult": "what a shard_placement_fn may return",
}


class NotThereYetError(NotImplementedError, AttributeError):
    """Raised for an attribute that is not there yet. It is an AttributeError too, so that
    ``hasattr`` answers False."""


class Missing(type):
    """The type of classes that stand for those that minifsdp does not have.

    A script may import such a class and use it in annotations. To call it, to inherit from it, or
    to ask it for a member raises NotImplementedError.
    """

    def _refuse(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"minifsdp.{cls.__name__} ({NAMES[cls.__name__]}) is not there yet"
        )

    __call__ = __getitem__ = __iter__ = __contains__ = _refuse

    def __init__(cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any]) -> None:
        for base in bases:
            base._refuse()

    def __getattr__(cls, name: str) -> NoReturn:
        raise NotThereYetError(f"minifsdp.{cls.__name__}.{name} is not there yet")


MISSING = {name: Missing(name, (), {"__module__": "minifsdp"}) for name in NAMES}
"""The classes by name. The names are those of ``torch.distributed.fsdp``."""


def add_missing(cls: type, names: str) -> None:
    """Give a class methods of these names, which raise NotImplementedError when called."""
    for name in names.split():
        setattr(cls, name, _not_there(name))


def join_hook(self: object, **kwargs: Any) -> NoReturn:
    """A method for torch's ``Join([model])``, under which ranks may have different numbers of
    batches. Raises NotImplementedError."""
    raise NotImplementedError(
        "minifsdp: Join is not there, and torch's FSDP has none either: a rank without a batch "
        "would have to gather and reduce each unit all the same. Let all ranks run the same number "
        "of steps: DistributedSampler(data, drop_last=True); or run a batch again, with its loss "
        "times zero."
    )


def _not_there(name: str) -> Callable[..., NoReturn]:
    def method(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"minifsdp: {name} is not there yet. It may make steps faster on GPUs, and no result "
            f"depends on it: leave the call out."
        )

    return method


def refuse(**arguments: Any) -> None:
    """Refuse arguments that ask for something that minifsdp cannot do.

    Args:
        arguments: values by name. None, False and empty collections ask for nothing.

    Raises:
        NotImplementedError: naming the first argument that asks for something.
    """
    for name, value in arguments.items():
        if _asks(value):
            raise NotImplementedError(f"minifsdp: {name}={value!r} is not there yet")


def _asks(value: object) -> bool:
    empty = isinstance(value, Sized) and len(value) == 0  # no modules, no parameters
    return not (value is None or value is False or empty)
