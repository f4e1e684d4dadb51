"""One function with functions in it, in place of classes. Which unit comes next is known while all
of a pass is as the last one was."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Event:
    def __init__(self, finish=lambda: None):
        self.finish = finish

    def wait(self):
        self.finish()
        self.finish = lambda: None

    synchronize = wait

    def query(self):
        return False


class Stream:
    def submit(self, launch):
        return Event(launch())

    def record_event(self):
        return Event()

    def wait_event(self, event):
        event.wait()

    def record_stream(self, tensor):
        pass


class Streams:
    def __init__(self, device):
        self.compute = self.unshard = self.reduce = Stream()


@dataclass(eq=False)
class Part:
    module: nn.Module
    owners: list[list[tuple[nn.Module, str]]]
    shapes: list[torch.Size]
    whole: torch.Tensor
    shard: nn.Parameter
    live: bool = False
    event: Any = None
    around: list["Part"] = field(default_factory=list)


def fsdp(model, *kinds, limit=2, forward_prefetch=True, backward_prefetch="pre"):
    streams = Streams(next(model.parameters()).device)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    freeing, pending, running = deque(), [], []
    now, last = {"forward": [], "backward": []}, {"forward": [], "backward": []}

    def run(operation, *tensors):
        work = operation(*tensors, async_op=tensors[0].device.type == "cpu")
        return work.wait if work is not None else lambda: None

    def pieces(part, flat):
        at = 0
        for shape in part.shapes:
            yield flat[at : at + shape.numel()].view(shape)
            at += shape.numel()

    def room(part):
        return limit - sum(other.live for other in parts if other not in part.around)

    def gather(part):
        def launch():
            part.whole.untyped_storage().resize_(part.whole.nbytes)
            return run(torch_all_gather, part.whole.data, part.shard.data)

        if part.live:
            return
        while freeing and (freeing[0].query() or len(freeing) >= room(part)):
            freeing.popleft().synchronize()
        part.live, part.event = True, streams.unshard.submit(launch)

    def prefetch(part):
        if part is not None and not part.live and room(part) > 0:
            gather(part)

    def free(part):
        if part.live:
            part.live = False
            part.event.wait()
            streams.compute.record_stream(part.whole.data)
            part.whole.untyped_storage().resize_(0)
            freeing.append(streams.compute.record_event())

    def show(part):
        for view, owners in zip(pieces(part, part.whole), part.owners, strict=True):
            for owner, name in owners:
                vars(owner)[name] = view

    def hide(part):
        for owner, name in (pair for owners in part.owners for pair in owners):
            vars(owner).pop(name, None)

    def begin(kind):
        last[kind], now[kind] = now[kind] or last[kind], []

    def following(kind, part):
        now[kind].append(part)
        same = last[kind][: len(now[kind])] == now[kind]
        return (last[kind][len(now[kind]) :] or [None])[0] if same else None

    def reset():
        for reduction in pending:
            reduction.event.wait()
        pending.clear()
        running.clear()
        for part in parts:
            hide(part)
            free(part)

    def start(*_):
        reset()
        streams.unshard.wait_event(streams.compute.record_event())
        begin("forward")

    def listen(part):
        after = SimpleNamespace(part=None)

        def before_forward(*_):
            gather(part)
            target = following("forward", part)
            prefetch(target if forward_prefetch else None)
            part.event.wait()
            show(part)

        def after_forward(module, args, output):
            hide(part)
            free(part)
            if output.requires_grad:
                output.register_hook(before_backward)

        def before_backward(grad):
            if not running:
                running.append(True)
                Variable._execution_engine.queue_callback(end)
                begin("backward")
            gather(part)
            after.part = following("backward", part)
            prefetch(after.part if backward_prefetch == "pre" else None)
            part.event.wait()

        def after_gradient(whole):
            free(part)
            prefetch(after.part if backward_prefetch == "post" else None)
            one = SimpleNamespace(part=part, sent=whole.grad.div_(ranks))
            whole.grad = None

            def launch():
                one.mean = one.sent.new_empty(part.shard.shape)
                return run(torch_reduce_scatter, one.mean, one.sent)

            if pending:
                pending[-1].event.wait()
                pending[-1].sent = None
            streams.reduce.wait_event(streams.compute.record_event())
            one.event = streams.reduce.submit(launch)
            pending.append(one)

        part.module.register_forward_pre_hook(before_forward)
        part.module.register_forward_hook(after_forward)
        part.whole.register_post_accumulate_grad_hook(after_gradient)

    def end():
        for part in parts:
            free(part)
        for one in pending:
            one.event.wait()
        for one in pending:
            old = one.part.shard.grad
            one.part.shard.grad = one.mean if old is None else old + one.mean
        pending.clear()
        running.clear()

    def make(module, params):
        shapes = [param.shape for param in params]
        size = -(-sum(shape.numel() for shape in shapes) // ranks)
        whole = next(iter(params)).new_zeros(size * ranks, requires_grad=False)
        at = 0
        for param in params:
            whole[at : at + param.numel()] = param.data.flatten()
            at += param.numel()
        shard = nn.Parameter(whole[size * rank : size * (rank + 1)].clone())
        for owner, name in (pair for owners in params.values() for pair in owners):
            owner._parameters.pop(name, None)
        module.register_parameter("shard", shard)
        whole.untyped_storage().resize_(0)
        return Part(module, [*params.values()], shapes, whole.requires_grad_(), shard)

    def full_params():
        paths, found = {module: name for name, module in model.named_modules()}, {}
        for part in parts:
            flat = torch.cat([part.shard.data] * ranks)
            torch_all_gather(flat, part.shard.data)
            for value, owners in zip(pieces(part, flat), part.owners, strict=True):
                for owner, name in owners:
                    found[f"{paths[owner]}.{name}".strip(".")] = value
        return found

    roots = {name: m for name, m in model.named_modules() if isinstance(m, kinds)} | {"": model}
    params_of: dict[str, dict[Any, list[Any]]] = {}
    for path, module in model.named_modules():
        inner = max((r for r in roots if not r or f"{path}.".startswith(f"{r}.")), key=len)
        for name, param in module.named_parameters(recurse=False):
            params_of.setdefault(inner, {}).setdefault(param, []).append((module, name))
    parts = [make(roots[path], params) for path, params in params_of.items()]
    for part in parts:
        inside = {*part.module.modules()} - {part.module}
        for other in parts:
            if other.module in inside:
                other.around.append(part)
    model.register_forward_pre_hook(start)
    for part in parts:
        listen(part)
    return SimpleNamespace(full_params=full_params)
