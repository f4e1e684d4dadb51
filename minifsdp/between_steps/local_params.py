"""Optimizers that compute with what this rank has, without asking DTensor about each operation.

In rows an optimizer has a DTensor for each parameter. For each operation on one, torch works out in
Python what the result's placement is, even where the answer is always the same: an element-wise
optimizer does to a shard what it would do to that part of the whole. For a model of many small
parameters this takes several times as long as the arithmetic::

    torch.optim.AdamW          _init_group collects lists of tensors     adamw(lists) computes
    with local_params          the same, but of their local tensors      the same

The state stays what it was: DTensors under the parameters, saved and loaded as before.
"""

from functools import wraps
from typing import Any

from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from minifsdp.support.dtensors import like, local_of

OF_WHOLE_MATRICES = ("Adafactor", "Muon")
"""Optimizers of torch that collect lists, and compute with rows, columns or whole parameters."""


def local_params(optimizer: Optimizer) -> Optimizer:
    """Let an element-wise optimizer of ``torch.optim`` compute with local tensors::

        optimizer = minifsdp.local_params(torch.optim.AdamW(model.parameters()))

    Each element's result is the same, bit for bit. Parameters that are not DTensors are stepped as
    before.

    Returns:
        The same optimizer.

    Raises:
        TypeError: it is not element-wise, or it is not known to be.
    """
    kind = type(optimizer)
    of_torch = getattr(optim, kind.__name__, None) is kind  # somebody's own may have its name
    element_wise = of_torch and kind.__name__ not in OF_WHOLE_MATRICES
    collect: Any = getattr(optimizer, "_init_group", None)
    if collect is None or not element_wise:
        raise TypeError(
            f"local_params is for element-wise optimizers of torch.optim, such as AdamW or SGD. "
            f"{kind.__name__} is not known to be one: where it needs more of a parameter than this "
            f"rank has, its steps would be wrong without an error. Use it as it is."
        )
    lent: list[tuple[Any, Tensor]] = []

    @wraps(collect)
    def collect_local(group: Any, params: list[Tensor], *lists: Any, **more: Any) -> Any:
        found = collect(group, params, *lists, **more)
        lent.extend((param, local_of(param)) for param in params if isinstance(param, DTensor))
        for tensors in (params, *lists):
            if isinstance(tensors, list):
                tensors[:] = map(local_of, tensors)
        return found

    def keep_state(*_: object) -> None:
        """SGD writes its buffers when it has computed them, under the tensors that it was given."""
        for param, local in lent:
            for name, value in optimizer.state.pop(local, {}).items():
                optimizer.state[param][name] = like(param, value)
        lent.clear()

    optimizer._init_group = collect_local  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(keep_state)
    return optimizer
