"""A GPU that is not there: real values in the host's memory, of which torch says that they are on
"cuda". For tests of what goes wrong only where there are two kinds of memory.

::

    with PretendedGpu():
        x = torch.ones(3, device="cuda")       memory of the host, with a mark on its storage
        y = x + x                              computed by the CPU; the result has the mark, too
        x.device                               cuda:0
        x + torch.ones(3)                      RuntimeError, as with CUDA: two devices
        x.to("cpu"), torch.ones(3).copy_(x)    cross from one to the other, as with CUDA

The engine then does what it does with CUDA: torch's own collectives, copies from host to device and
back. So does torch's own FSDP, with which tests compare. A process group of the backend ``NCCL``
carries what is on the GPU alone, as one of NCCL's does, though it is gloo that carries it, and says
that it is one of NCCL's. In these things it is not like a GPU:

- It has no time. A stream does its work at once, so a wait that is missing is not noticed. (With
  the streams of ``lagging.deferring_device`` it is; and on the virtual GPU of minifsdp/sim, where
  there is nothing to be seen of values.) But what ``x.to("cpu", non_blocking=True)`` returns has
  its values only when the host has waited for the GPU: torch gives it memory that is pinned.
- A function of torch that is written in Python, as ``multi_head_attention_forward`` is, can make
  tensors on the GPU inside, but gets the answer "cpu" where it asks a tensor for its device.
- gloo's threads let go of a tensor a moment after it has arrived. A unit that is freed so soon is
  now and then said to be still referred to.
"""

import functools
import math
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minifsdp.core.streams import BACKENDS, PASSED, CpuStream, Event, Launch, Streams
from minifsdp.support.param_access import Placeholder

GPU = torch.device("cuda", 0)
NCCL = "cuda:gloo,cpu:gloo"  # no program writes it in this order: it is how such a group is known


class PretendedGpu:
    """Inside of a ``with`` block this process has one GPU.

    Attributes:
        waits: what has let the host wait for the GPU: that it asks for a value, or copies from one
            to the other without ``non_blocking``.
    """

    current: "PretendedGpu | None" = None  # that of the block that this process is inside of

    def __init__(self) -> None:
        self._kernels = _Kernels()
        self.waits = self._kernels.waits
        self._on_its_way: list[tuple[Tensor, Tensor]] = []  # to memory of the host; and the values

    def send(self, to: Tensor) -> None:
        """The host gets these values when it next waits."""
        self._on_its_way.append((to, to.clone()))
        to.fill_(math.nan if to.is_floating_point() else 1)

    def wait(self, *args: Any) -> None:
        """The host waits until all that was asked for is done."""
        on_its_way, self._on_its_way = self._on_its_way, []
        for to, values in on_its_way:
            to.copy_(values)

    def __enter__(self) -> "PretendedGpu":
        devices, run_backward = _Devices(self._kernels), torch.autograd._engine_run_backward

        def run_backward_with_devices(*args: Any, **kwargs: Any) -> Any:
            # torch turns a function mode off while it asks it about Tensor.backward.
            with devices, patch.object(self._kernels, "asked", False):
                return run_backward(*args, **kwargs)

        push_hooks = torch._C._autograd._push_saved_tensors_default_hooks

        def push_hooks_with_devices(pack: Any, unpack: Any) -> None:
            of_engine = type(pack).__module__.startswith("minifsdp.")  # it looks for its own
            push_hooks(pack if of_engine else devices.around(pack), devices.around(unpack))

        self._stack = ExitStack()
        torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor has its device from C++
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        packages = [(0, location_of, _put_at), *torch.serialization._package_registry]
        for context in (
            patch.object(PretendedGpu, "current", self),
            patch.dict(BACKENDS, cuda=_streams),
            patch("torch.cuda.is_available", lambda: True),
            patch("torch.cuda._lazy_init", lambda: None),
            patch("torch.backends.cudnn.is_acceptable", lambda tensor: False),
            patch("torch._C._get_accelerator", lambda: torch.device("cuda")),
            patch("torch.cuda.Stream", _TorchStream),
            patch("torch.cuda.Event", _TorchEvent),
            patch("torch.cuda.stream", nullcontext),
            patch("torch.cuda.current_stream", _TorchStream),
            patch("torch.cuda.default_stream", _TorchStream),
            patch("torch.cuda.is_current_stream_capturing", lambda: False),  # CUDA's builds ask it
            patch("torch.accelerator.current_stream", _TorchStream),  # and since torch 2.14 this
            patch.object(Tensor, "record_stream", lambda tensor, stream: None),
            patch("torch.cuda.synchronize", self.wait),
            patch("torch.tensor", functools.partial(_on_current, torch.tensor)),
            patch("torch.serialization._package_registry", packages),
            patch.object(dist, "get_backend_config", _backends),
            patch.object(Placeholder, "_parameter", devices.around(Placeholder._parameter)),
            patch("torch.cuda.current_device", lambda: GPU.index),
            patch("torch.cuda.device_count", lambda: 1),
            patch("torch.cuda.set_device", lambda device: None),
            patch("torch.cuda.get_rng_state", lambda *device: torch.get_rng_state()),
            patch("torch.cuda.set_rng_state", lambda *state_and_device: None),  # it is the CPU's
            patch("torch.autograd._engine_run_backward", run_backward_with_devices),
            patch("torch._C._autograd._push_saved_tensors_default_hooks", push_hooks_with_devices),
            patch(f"{_C10D}._get_object_coll_device", _device_of_objects),
            patch(f"{_C10D}._get_pg_default_device", _device_of_objects),
            self._kernels,
            devices,
        ):
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is in the GPU's memory; a DTensor, whether its local tensor is."""
    return getattr(_memory(tensor), "on_gpu", False) is True


def _is_on_host(tensor: Tensor) -> bool:
    """False as well for what torch has made itself, which may be on either."""
    return getattr(_memory(tensor), "on_gpu", False) is False


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return (tensor._values() if tensor.is_sparse else tensor).untyped_storage()


def _put(tensors: object, on_gpu: bool | None) -> None:
    """Write to the storages of new tensors whether they are on the GPU. None: wherever they are
    used, unless that is known."""
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            memory = _memory(tensor)
            memory.on_gpu = getattr(memory, "on_gpu", None) if on_gpu is None else on_gpu


class _Kernels(TorchDispatchMode):
    """Below autograd: what is computed from tensors on the GPU is on the GPU, and nothing can be
    computed from tensors on both."""

    sees_engine = True  # see dispatch_modes.py

    def __init__(self) -> None:
        super().__init__()
        self.asked = False  # a program asks for what runs now; else torch does: autograd, or gloo
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        made_on_gpu = str(kwargs.get("device")).startswith("cuda")  # by torch, inside a function
        if made_on_gpu:
            kwargs["device"] = torch.device("cpu")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return NotImplemented  # then it comes again, for the local tensors
        on_gpu = any(map(is_on_gpu, tensors))
        if func.namespace == "c10d" and func is not torch.ops.c10d.barrier.default:
            _check_carried(func, args, tensors)
        if func is torch.ops.aten._pin_memory.default:
            return args[0].clone()  # all of this memory is the host's
        if on_gpu and func.overloadpacket not in _CROSSING:
            self._check_same_device(func, tensors)
        if on_gpu and self.asked and _waits(func, *args):
            self.waits.append(str(func))
            PretendedGpu.current.wait()
        result = func(*args, **kwargs)
        if made_on_gpu or (on_gpu and func.overloadpacket not in _CROSSING):
            _put(result, True)
        elif not (on_gpu or self.asked or any(map(_is_on_host, tensors))):
            _put(result, None)  # zeros for a gradient that did not come, say
        return result

    def _check_same_device(self, func: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            on_host = _is_on_host(tensor)
            if on_host and func.overloadpacket in _INDEXING and tensor is not tensors[0]:
                self.waits.append(f"{func} of indices on the host")
                continue
            # CUDA takes a number on the host for an operand, but not to compare it with `equal`.
            if on_host and (tensor.dim() or func is torch.ops.aten.equal.default):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two "
                    f"devices, {GPU} and cpu! ({func})"
                )


def _check_carried(func: Any, args: tuple, tensors: list[Tensor]) -> None:
    (group,) = (arg for arg in args if str(getattr(arg, "_type", str)()).endswith("ProcessGroup"))
    if _is_nccl(dist.ProcessGroup.unbox(group)) and any(map(_is_on_host, tensors)):
        raise RuntimeError(f"No backend type associated with device type cpu ({func})")


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    destroyed = group is not None and group not in dist.distributed_c10d._world.pg_map
    return not destroyed and str(_get_backend_config(group)) == NCCL


def _backends(group: dist.ProcessGroup | None = None) -> str:
    return "cuda:nccl" if _is_nccl(group) else str(_get_backend_config(group))


def _device_of_objects(group: dist.ProcessGroup | None = None) -> torch.device | str:
    """Where torch puts objects that a group is to carry."""
    return GPU if _is_nccl(group) else "cpu"


def _waits(func: Any, *args: Any) -> bool:
    if func is torch.ops.aten.copy_.default:
        to, source, *non_blocking = args
        return is_on_gpu(to) != is_on_gpu(source) and not any(non_blocking)
    return func.overloadpacket in _WAITING


_get_backend_config = dist.get_backend_config
_C10D = "torch.distributed.distributed_c10d"
_CROSSING = {torch.ops.aten.copy_}
_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put_}
_OF_VALUES = {torch.tensor, torch.as_tensor, Tensor.new_tensor}
_WAITING = {torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero}


class _Devices(TorchFunctionMode):
    """Above autograd: what a program asks and says of devices.

    Args:
        kernels: of the same GPU.
    """

    def __init__(self, kernels: _Kernels) -> None:
        super().__init__()
        self._kernels = kernels

    def around(self, function: Any) -> Any:
        """A function that runs in this mode, also where it is called in the middle of another one,
        for which torch has turned the mode off."""

        @functools.wraps(function, updated=())
        def call(*args: Any) -> Any:
            with nullcontext() if self in _get_current_function_mode_stack() else self:
                return function(*args)

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload):  # it is called by the mode below
            return func(*args, **kwargs)
        if func is torch.device and isinstance(args[0], int):
            return GPU
        if func in _ANSWERS and is_on_gpu(args[0]):
            return _ANSWERS[func]
        kwargs.pop("pin_memory", None)  # all of this memory is the host's
        func, args, kwargs = _as_to(func, args, kwargs)
        device = kwargs.get("device")
        if func is Tensor.tolist and is_on_gpu(args[0]):
            self._kernels.waits.append("tolist")
        # What gloo copies while it stands in for NCCL is nobody's wait.
        is_collective = (getattr(func, "__module__", "") or "").startswith("torch.distributed.")
        with patch.object(self._kernels, "asked", not is_collective):
            if device is None or torch.device(device).type == "meta":
                return func(*args, **kwargs)
            on_gpu = torch.device(device).type == "cuda"
            kwargs["device"] = "cpu"
            if func is Tensor.to and is_on_gpu(args[0]) != on_gpu:
                kwargs["copy"] = True  # torch would see that it is on the CPU already
                if not kwargs.get("non_blocking"):
                    self._kernels.waits.append("to")
            if on_gpu and func in _OF_VALUES:
                self._kernels.waits.append("a tensor of values of the host")
            from_gpu = func is Tensor.to and not on_gpu and is_on_gpu(args[0])
            result = func(*args, **kwargs)
            _put(result, on_gpu)
            if from_gpu and kwargs.get("non_blocking"):
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    PretendedGpu.current.send(result.detach())
            return result


def _as_to(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """The ways to say "copy it to this device" as one: ``tensor.to(..., device=device)``."""
    if func is Tensor.type_as:
        func, args, kwargs = Tensor.to, (args[0], kwargs.get("other", args[-1])), {}
    if func in (Tensor.cuda, Tensor.cpu):
        return Tensor.to, args[:1], {"device": GPU if func is Tensor.cuda else "cpu"}
    if func is not Tensor.to or len(args) < 2 or isinstance(args[1], torch.dtype):
        return func, args, kwargs
    tensor, to, *rest = args
    if isinstance(to, Tensor):
        kwargs, rest = {**kwargs, "dtype": to.dtype}, [None, *rest]
        to = GPU if is_on_gpu(to) else "cpu"
    names = ("dtype", "non_blocking", "copy", "memory_format")
    given = dict(zip(names, rest, strict=False))
    return func, (tensor,), {**given, **kwargs, "device": to}


_ANSWERS = {
    Tensor.device.__get__: GPU,
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.get_device: GPU.index,
}


class _Stream(CpuStream):
    """Work on the GPU, which is over as soon as it is asked for."""

    def submit(self, launch: Launch, label: str = "") -> Event:
        launch()()
        return PASSED


def _streams(device: torch.device) -> Streams:
    return Streams(device, *(_Stream() for _ in range(6)))


class _TorchEvent:
    """torch.cuda.Event, for programs that make streams themselves, as torch's own FSDP does."""

    def __init__(self, **settings: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    wait = record

    def synchronize(self) -> None:
        PretendedGpu.current.wait()

    def query(self) -> bool:
        return True


class _TorchStream:
    """torch.cuda.Stream."""

    def __init__(self, *device: Any, **settings: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    wait_event = wait_stream

    def synchronize(self) -> None:
        PretendedGpu.current.wait()

    def record_event(self, event: _TorchEvent | None = None) -> _TorchEvent:
        return event or _TorchEvent()

    def is_capturing(self) -> bool:
        return False


def _on_current(make: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Make a tensor on ``cuda:0``, where torch itself asks for ``cuda``: only C++ that has been
    built with CUDA knows that the current GPU is meant."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        kwargs["device"] = GPU
    return make(*args, **kwargs)


def location_of(storage: torch.UntypedStorage) -> str | None:
    """Where a storage is, for torch.save. None: not on the GPU."""
    return str(GPU) if getattr(storage, "on_gpu", False) is True else None


def _put_at(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """For torch.load: a storage that has been read, where it is to be. None: torch knows it."""
    if not location.startswith("cuda"):
        return None
    storage.on_gpu = True
    return storage
