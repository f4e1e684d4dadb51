"""What torch's FSDP has and minifsdp does not: refused by name, never ignored.

An argument that is silently not obeyed is worse than an error: better no sharding than another one
than was asked for.
"""

from collections.abc import Callable
from typing import Any, NoReturn

METHODS = """
    flatten_sharded_optim_state_dict full_optim_state_dict get_state_dict_type optim_state_dict
    optim_state_dict_to_load register_comm_hook rekey_optim_state_dict
    scatter_full_optim_state_dict set_state_dict_type shard_full_optim_state_dict
    sharded_optim_state_dict state_dict_type
"""


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
    """Refuse arguments that were given and would change nothing.

    Raises:
        NotImplementedError: with the first one's name.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"minifsdp: {name}={value!r} is not there yet")
