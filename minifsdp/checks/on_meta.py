"""Parameters and buffers that have no memory yet: refused by name before they are computed with.

``fully_shard`` leaves on the meta device what is there, as torch's does. So a rank never has more
memory than its part of the model takes, and the program says what the values are::

    with torch.device("meta"):
        model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)                         # DTensors on meta
    model.to_empty(device="cuda")              # memory for this rank's rows
    model.init_weights()                       # or load_state_dict(state, assign=True)

This looks before each start until the first step is over, and not in each step after it.
"""

from torch import nn

from minifsdp.streams import has_memory
from minifsdp.support.flat_parameter import FlatParameter
from minifsdp.wrapping.module_tree import clean, is_ignored, join_names


def check_on_meta(root: nn.Module) -> None:
    """Refuse a model with something on the meta device.

    Raises:
        RuntimeError: naming the parameters and buffers.
    """
    ignored = {inner for m in root.modules() if is_ignored(m) for inner in m.modules()}
    names = [
        join_names(clean(prefix), name)
        for prefix, module in root.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
        and not (isinstance(tensor, FlatParameter) or is_ignored(tensor) or module in ignored)
        and not has_memory(tensor)
    ]
    if names:
        raise RuntimeError(
            f"{', '.join(names[:10])}{', ...' * (len(names) > 10)}: on the meta device, so without "
            f"memory and values, and fully_shard leaves them there. Before the model is used, call "
            f"model.to_empty(device=...) and then model.init_weights() (or what gives it values), "
            f"or model.load_state_dict(state, assign=True). The device is 'cpu' with "
            f"CPUOffloadPolicy. What is in no state dict, such as a table of positions, needs "
            f"values in both cases."
        )
