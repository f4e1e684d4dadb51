"""What torch's FSDP has and minifsdp does not: refused by name, never ignored.

An argument that is silently not obeyed is worse than an error: better no sharding than another one
than was asked for.
"""

from collections.abc import Callable, Sized
from typing import Any, NoReturn

METHODS = """
    flatten_sharded_optim_state_dict full_optim_state_dict get_state_dict_type optim_state_dict
    optim_state_dict_to_load register_comm_hook rekey_optim_state_dict
    scatter_full_optim_state_dict set_state_dict_type shard_full_optim_state_dict
    sharded_optim_state_dict state_dict_type
"""


NAMES = """
    FullOptimStateDictConfig FullStateDictConfig fully_shard LocalOptimStateDictConfig
    LocalStateDictConfig OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig
    ShardedStateDictConfig StateDictConfig StateDictSettings StateDictType
"""


class NotThereYetError(NotImplementedError, AttributeError):
    """Of an attribute that is not there yet. ``hasattr`` takes it for False."""


class Missing(type):
    """A class in the place of one that is not there. A script may import it and name it in its
    annotations; whoever calls it or asks it for a member is refused."""

    def _refuse(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"minifsdp.{cls.__name__} is not there yet")

    __call__ = __getitem__ = __iter__ = __contains__ = _refuse

    def __init__(cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any]) -> None:
        for base in bases:
            base._refuse()

    def __getattr__(cls, name: str) -> NoReturn:
        raise NotThereYetError(f"minifsdp.{cls.__name__}.{name} is not there yet")


MISSING = {name: Missing(name, (), {"__module__": "minifsdp"}) for name in NAMES.split()}
"""By their names, which are those of ``torch.distributed.fsdp``."""


def add_missing(wrapper: type) -> None:
    """Give a class methods of these names, which say that they are not there."""
    for name in METHODS.split():
        setattr(wrapper, name, _not_there(name))


def _not_there(name: str) -> Callable[..., NoReturn]:
    def method(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"minifsdp: {name} is not there yet. FSDP.summon_full_params(model) gives access to "
            f"whole parameters under their own names."
        )

    return method


def refuse(**arguments: Any) -> None:
    """Refuse arguments that ask for something, which would not be done.

    Raises:
        NotImplementedError: with the first one's name.
    """
    for name, value in arguments.items():
        if _asks(value):
            raise NotImplementedError(f"minifsdp: {name}={value!r} is not there yet")


def _asks(value: object) -> bool:
    empty = isinstance(value, Sized) and len(value) == 0  # no modules, no parameters
    return not (value is None or value is False or empty)
