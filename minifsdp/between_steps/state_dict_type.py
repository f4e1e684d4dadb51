"""Whether state dicts have whole tensors or DTensors, by the names of torch's FSDP1.

::

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                              FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        model_state = model.state_dict()                      whole tensors, on the first rank
        optim_state = FSDP.optim_state_dict(model, optimizer)

    FULL_STATE_DICT       whole tensors                     one file, for any program
    SHARDED_STATE_DICT    DTensors, each rank its rows      torch.distributed.checkpoint
    LOCAL_STATE_DICT      refused: chunks without names, for exactly the same model and ranks

The enumeration and the classes of settings are torch's own.

Source: ``torch.distributed.fsdp.FullyShardedDataParallel`` (pytorch 2.13).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from minifsdp.checks.unsupported import refuse
from minifsdp.wrapping.attributes import ModuleWrapper

FULL = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
)
"""What every wrapper begins with."""

_CONFIGS = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set what ``state_dict()`` and ``optim_state_dict()`` return, for all wrappers at and below
    ``module``. What is loaded may be of either type in any case.

    Args:
        state_dict_config: of the class that belongs to the type; None: one with all defaults.
        optim_state_dict_config: the same, for optimizers.

    Returns:
        The settings before this call.

    Raises:
        NotImplementedError: LOCAL_STATE_DICT.
        ValueError: a config belongs to a different type.
    """
    if state_dict_type not in _CONFIGS:
        refuse(state_dict_type=state_dict_type)
    given = (state_dict_config, optim_state_dict_config)
    made: list[Any] = []
    for config, expected in zip(given, _CONFIGS[state_dict_type], strict=True):
        made.append(expected() if config is None else config)
        if type(made[-1]) is not expected:
            raise ValueError(
                f"{state_dict_type} takes a {expected.__name__}, not a {type(config).__name__}"
            )
    before = get_state_dict_type(module)
    for wrapper in _wrappers(module):
        wrapper._state_dict_settings = StateDictSettings(state_dict_type, *made)
    return before


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """:func:`set_state_dict_type`, for the time of a block."""
    wrappers = _wrappers(module)
    before = [wrapper._state_dict_settings for wrapper in wrappers]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for wrapper, settings in zip(wrappers, before, strict=True):
            wrapper._state_dict_settings = settings


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """The settings of the outermost wrapper at or below ``module``."""
    wrappers = _wrappers(module)
    found: StateDictSettings = wrappers[0]._state_dict_settings if wrappers else FULL
    return found


def _wrappers(module: nn.Module) -> list[Any]:
    return [inner for inner in module.modules() if isinstance(inner, ModuleWrapper)]
