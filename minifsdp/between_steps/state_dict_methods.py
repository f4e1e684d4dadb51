"""The methods of torch's FSDP1 that have to do with state dicts, for scripts that call them."""

from minifsdp.between_steps.optim_state_dict import optim_state_dict, optim_state_dict_to_load
from minifsdp.between_steps.state_dict_type import (
    FULL,
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
)


class StateDictMethods:
    """A base of :class:`FullyShardedDataParallel`. Each of these is a function of its own, in
    state_dict_type.py or optim_state_dict.py, and takes the model as its first argument."""

    _state_dict_settings = FULL
    set_state_dict_type = staticmethod(set_state_dict_type)
    get_state_dict_type = staticmethod(get_state_dict_type)
    state_dict_type = staticmethod(state_dict_type)
    optim_state_dict = staticmethod(optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state_dict_to_load)
