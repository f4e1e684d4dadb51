"""The methods of torch's FSDP1 that have to do with state dicts, for scripts that call them."""

from minifsdp.between_steps.older_optim_state import (
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from minifsdp.between_steps.optim_state_dict import optim_state_dict, optim_state_dict_to_load
from minifsdp.between_steps.state_dict_type import (
    FULL,
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
)


class StateDictMethods:
    """A base of :class:`FullyShardedDataParallel`. Each of these is a function of its own, in
    state_dict_type.py, optim_state_dict.py or older_optim_state.py."""

    _state_dict_settings = FULL
    set_state_dict_type = staticmethod(set_state_dict_type)
    get_state_dict_type = staticmethod(get_state_dict_type)
    state_dict_type = staticmethod(state_dict_type)
    optim_state_dict = staticmethod(optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(rekey_optim_state_dict)
