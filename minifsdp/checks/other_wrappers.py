"""Other wrappers around a sharded model, and what cannot be sharded inside of one: refused by name.

::

    DistributedDataParallel(FSDP(model))      TypeError
    FSDP(DistributedDataParallel(model))      ValueError
    FSDP(torch.jit.script(model))             ValueError

DistributedDataParallel sends rank 0's parameters to all ranks when it is built. That would write
rank 0's chunk over the chunks of all other ranks. Even if nothing is sharded, it would reduce
gradients that have been reduced already.

torch calls registered hooks whenever a module is put into another one. DistributedDataParallel and
DataParallel put the model into themselves before they do anything with it, so such a hook can
refuse in time. torch's own FSDP sets an attribute on all modules first, which is refused in
wrapping/attributes.py. None of this runs in a step.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from minifsdp.checks.members import WRAPPED
from minifsdp.dispatch_modes import never_compile_inside
from minifsdp.support.divided_param import is_optimized
from minifsdp.support.tensor_parallel import check_meshes, check_on_mesh
from minifsdp.wrapping.module_tree import clean, is_ignored, unit_of

AROUND = (DistributedDataParallel, DataParallel)
OTHERS = (*AROUND, TorchsFSDP, FSDPModule)


def check_inside(
    module: nn.Module, mesh: DeviceMesh | None = None, whole: DeviceMesh | None = None
) -> None:
    """Refuse to wrap a module that contains another wrapper, or what cannot be cut into chunks:
    scripted modules, sparse tensors, gradients of sparse embeddings, distributed tensors, tensors
    of classes with operations of their own. Ignored modules and parameters may have them.

    Args:
        mesh: of the ranks to share the parameters, if they may be distributed on another one
            already (tensor_parallel.py).
        whole: the mesh that they have to be distributed on, of which ``mesh`` is a part.

    Raises:
        ValueError: naming the module or parameter.
    """
    for name, inner in module.named_modules():
        if is_ignored(inner):
            continue
        if isinstance(inner, torch.jit.ScriptModule):
            raise ValueError(
                f"module {clean(name) or '<root>'!r} is compiled by torch.jit. Such a module takes "
                f"no views for its parameters, and no hooks for its state dict. Wrap the plain "
                f"module; torch.compile works."
            )
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse:
            raise ValueError(
                f"module {clean(name) or '<root>'!r} ({type(inner).__name__}) has sparse "
                f"gradients, which cannot be parts of a flat one. Build it with sparse=False, or "
                f"ignore it (ignored_modules; ignored_params in fully_shard)."
            )
        if isinstance(inner, OTHERS):
            cls = type(inner)
            raise ValueError(
                f"module {clean(name) or '<root>'!r} ({cls.__module__}.{cls.__qualname__}) shards "
                f"or reduces by itself, as FullyShardedDataParallel does. Wrap the plain module "
                f"that is in it."
            )
        for attribute, param in inner._parameters.items():
            where = clean(f"{name}.{attribute}").lstrip(".")
            if is_ignored(param):
                continue
            if param is not None and param.layout is not torch.strided:
                raise ValueError(
                    f"parameter {where!r} has the layout {param.layout}, so it cannot be a part "
                    f"of a flat tensor. FullyShardedDataParallel takes dense tensors."
                )
            if whole is not None and param is not None and not is_optimized(param):
                assert mesh is not None
                check_on_mesh(where, param, whole, mesh)
            elif isinstance(param, DTensor) and not is_optimized(param):
                check_meshes(where, param, mesh)
            if isinstance(param, UninitializedParameter):
                raise ValueError(
                    f"parameter {where!r} has no shape yet: {type(inner).__name__} finds it out in "
                    f"its first forward. Run the model once before you wrap it."
                )
            if param is not None and not is_optimized(param) and _has_own_operations(param):
                cls = type(param)
                how = "is gathered" if hasattr(cls, "fsdp_pre_all_gather") else "computes"
                raise ValueError(
                    f"parameter {where!r} is a {cls.__module__}.{cls.__qualname__}, which {how} "
                    f"in its own way. A unit is one flat tensor of plain numbers, so it would lose "
                    f"that. Leave it out with ignored_params={{...}} of fully_shard or "
                    f"ignored_states=[...] of FullyShardedDataParallel, or convert it to a plain "
                    f"nn.Parameter before you wrap the model."
                )


def _has_own_operations(param: Tensor) -> bool:
    """Whether the class of a parameter does more than add attributes to nn.Parameter. That of a
    quantized tensor does, for example: in it one number is made of several. (For DTensors see
    tensor_parallel.py.)"""
    cls, plain = type(param), nn.Parameter
    changed = (cls.__torch_function__, cls.__torch_dispatch__) != (
        plain.__torch_function__, plain.__torch_dispatch__,
    )  # fmt: skip
    return cls is not DTensor and (changed or hasattr(cls, "fsdp_pre_all_gather"))


def refuse_around(other: str, module: nn.Module) -> None:
    """Refuse to wrap ``module`` in something else if it is or contains a sharded model.

    Args:
        other: the name of the other wrapper.

    Raises:
        TypeError: naming both wrappers.
    """
    for name, inner in module.named_modules():
        if (unit := unit_of(inner)) is not None:
            what = "the model" if inner is module else f"module {clean(name)!r}"
            wrapped = inner._modules.get(WRAPPED, inner)
            by = "fully_shard" if wrapped is inner else "FullyShardedDataParallel"
            raise TypeError(
                f"{other} cannot wrap this: {what} ({type(wrapped).__name__}, unit "
                f"{unit.label}) is sharded by minifsdp.{by}, which reduces gradients over the "
                f"ranks itself. Leave {other} out; give what is around the sharded part to {by}, "
                f"too."
            )


@never_compile_inside  # see members.check_part
def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(parent, AROUND) and child is not None:
        refuse_around(type(parent).__name__, child)


register_module_module_registration_hook(_on_registration)
