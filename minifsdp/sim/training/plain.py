"""A plain ``nn.Module`` as a :class:`Job`: its blocks, its input and its loss are found out.

======  ==========================================================================================
blocks  of the classes of which a ModuleList or a Sequential has several, that with most parameters
input   tokens, ``[batch, length]``; with ``--input 3x224x224``, floats ``[batch, 3, 224, 224]``
loss    the cross-entropy, if of tokens ``[batch, length, vocabulary]`` comes out; else the sum
======  ==========================================================================================
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from minifsdp.core.outputs import tensors_in
from minifsdp.sim.cli.blame import blaming
from minifsdp.sim.training.models import Job


def job_of(name: str, build: Callable[[], nn.Module], shape: str) -> Job:
    """How to train what ``build`` makes. It is made once here, without values.

    Args:
        name: the user's, for messages.
        shape: of one sample, as ``3x224x224``; empty for tokens.
    """

    def made() -> nn.Module:
        return build().to("meta")  # whatever device it has chosen for itself

    def loss(model: nn.Module, batch: int, length: int) -> Tensor:
        if shape:
            return _sum(model(torch.zeros(batch, *map(int, shape.split("x")))))
        tokens = torch.zeros(batch, length, dtype=torch.long)
        output = model(tokens)
        logits = getattr(output, "logits", output)
        if isinstance(logits, Tensor) and logits.shape[:2] == tokens.shape and logits.dim() == 3:
            return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        return _sum(output)

    with torch.device("meta"):
        module = made()
    block, count = repeated(module)
    note = f"model {name!r}: the model is one unit, since no class is repeated in it"
    if block is not None:
        note = f"model {name!r}: units are the {count} modules of class {block.__name__}"
    if any(part._compiled_call_impl or hasattr(part, "_orig_mod") for part in module.modules()):
        note += "; torch.compile is not modelled, so figures are those without it"
    return Job(made, (block,) if block else (), loss, note)


def tried(job: Job, name: str, shape: str, length: int) -> None:
    """Run a model's forward once, on two samples without values, before it is run for long.

    Raises:
        ValueError: it fails.
    """
    with torch.device("meta"):
        with blaming(name, "its constructor"):
            module = job.build()
        guessed = f" on {length} tokens (for other inputs: --input 3x224x224)"
        with blaming(name, "its forward" + guessed * bool(job.note and not shape)):
            trained = job.loss(module, 2, length).requires_grad
    if not trained:
        raise ValueError(f"model {name!r}: its loss has no gradient")


def _sum(output: object) -> Tensor:
    floats = [t for t in tensors_in(output) if t.is_floating_point()]
    return torch.stack([t.float().sum() for t in floats]).sum() if floats else torch.zeros(())


def repeated(module: nn.Module) -> tuple[type[nn.Module] | None, int]:
    """The class with most parameters, of those of which a list has several; and how many."""
    sizes, counts = Counter[type[nn.Module]](), Counter[type[nn.Module]]()
    for container in module.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            here = Counter(map(type, container))
            for part in container:
                if here[type(part)] > 1:
                    sizes[type(part)] += sum(p.numel() for p in part.parameters())
                    counts[type(part)] += 1
    # Of those with as many parameters the first is the outermost.
    best = max(sizes, key=lambda kind: sizes[kind], default=None)
    return (best, counts[best]) if best is not None and sizes[best] else (None, 0)
