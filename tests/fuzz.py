"""Random cases with minifsdp and without, compared bit for bit.

    python -m tests.fuzz 1000                     # seeds 0 to 999, in worlds of 1 to 4 ranks
    python -m tests.fuzz 1 --seed 17 --world 2    # one of them again

tests/random_models.py draws the cases, tests/reference.py says what has to come out. A case that
fails is shown, with the command that repeats it, and the next one is tried.
"""

import argparse
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from minifsdp import (
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    SynchronizeAfterFree,
    fully_shard,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.sim.cli.terminal import end_tidily
from tests.parity import check_at_rest
from tests.random_models import (
    ALL,
    DIFFERENT,
    KEPT,
    MAIN,
    REFUSED,
    Boom,
    Border,
    Case,
    Keeps,
    Penalized,
    Trap,
    build,
    describe,
    random_case,
    ranks_in_a_row,
    split,
    unit_names,
)
from tests.ranks import RankFailure, cached_in_a_world, device, run
from tests.reference import SGD, Groups, Reference, somewhere

with warnings.catch_warnings():  # it scripts functions
    warnings.simplefilter("ignore")
    from torch.distributed.optim import _apply_optimizer_in_backward

WORLDS = (1, 2, 3, 4)


class Differs(AssertionError):  # noqa: N818
    """A result is not the reference's."""


# ------------------------------------------------------------------------------------ two models


def initial(case: Case, rank: int) -> nn.Module:
    """The module with its first values; those of the first rank count."""
    seed_everything(case.seed + 1_000_000 * rank * case.sync_module_states)
    return build(case).to(device())


def reference(case: Case) -> Reference:
    units = {name: (border, groups(border)) for name, border in case.borders.items()}
    kept = case.precision.reduce_dtype if case.by_function else None
    return Reference(initial(case, 0), units, unit_names(case), case.precision, case.in_rows, kept)


def by_function(case: Case) -> Any:
    """The same module, whose units are made by ``fully_shard``."""
    module = initial(case, dist.get_rank())
    if case.compiled_first:
        compile_some(case, module, module)
    dtypes = case.precision.param_dtype, case.precision.reduce_dtype
    # As torch's: a unit casts its inputs, and its outputs stay as they are.
    policies = {"mp_policy": MixedPrecisionPolicy(*dtypes)}
    if case.offload:
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    units = {module.get_submodule(name): border for name, border in case.borders.items()}
    lists = {inner_first(several)[-1]: several for several in modules_of_lists(case, module)}
    in_lists = {inner for several in lists.values() for inner in several}
    world, rng = dist.get_world_size(), random.Random(case.seed)
    for unit in inner_first(units):
        if unit in in_lists and unit not in lists:
            continue  # the last of its list has its turn when all units inside of them are made
        ranks, strategy = ranks_in_a_row(units[unit], world), units[unit].strategy
        reshards: bool | int = "2" not in strategy.name and "OP" not in strategy.name
        if strategy is ShardingStrategy.FULL_SHARD and rng.random() < 0.5:
            reshards = ranks  # to a part that so many ranks share
        mesh = mesh_of(ranks) if "HYBRID" in strategy.name else None
        given = lists.get(unit, unit)
        fully_shard(given, mesh=mesh, reshard_after_forward=reshards, **policies)
    for unit in units:
        for order in ("forward", "backward") if rng.random() < 0.3 else ():
            listed = rng.sample([*units], rng.randint(0, min(2, len(units))))
            getattr(unit, f"set_modules_to_{order}_prefetch")(listed)
    return module


def compile_some(case: Case, model: nn.Module, plain: nn.Module) -> None:
    """Those modules of a case that are compiled: their wrappers, where they have one."""
    for name in case.compiled:
        module = plain.get_submodule(name) if name else model
        module.compile(backend="eager")  # others may compute in another order


def modules_of_lists(case: Case, module: nn.Module) -> list[list[nn.Module]]:
    return [[module.get_submodule(name) for name in several] for several in case.lists]


def inner_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return sorted(modules, key=lambda module: sum(1 for _ in module.modules()))


@cached_in_a_world
def mesh_of(length: int) -> DeviceMesh:
    """Of two dimensions, with ranks in rows of this length."""
    ranks = dist.get_world_size()
    names = ("replicate", "shard")
    return init_device_mesh(device().type, (ranks // length, length), mesh_dim_names=names)


def wrapped(case: Case) -> FSDP:
    """The same module, wrapped as the case says."""
    module = original = initial(case, dist.get_rank())
    if case.meta:
        with torch.device("meta"):
            module = build(case)
    if case.compiled_first:
        compile_some(case, module, module)
    names = {inner: name for name, inner in module.named_modules()}

    def init(inner: nn.Module) -> None:
        source = original.get_submodule(names[inner])
        inner.to_empty(device=device(), recurse=False)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(inner, kind).items():
                tensor.copy_(getattr(source, kind)[name])

    of_all = {
        "cpu_offload": CPUOffload(case.offload),
        "mixed_precision": case.precision,
        "param_init_fn": init if case.meta else None,
        "sync_module_states": case.sync_module_states,
        "use_orig_params": case.in_rows,
    }
    of_root = {
        "backward_prefetch": case.backward_prefetch,
        "forward_prefetch": case.forward_prefetch,
        "limit_all_gathers": SynchronizeAfterFree() if isinstance(case.limit, str) else case.limit,
    }
    units = {module.get_submodule(name): name for name in case.borders}
    settings = {unit: own_settings(case, name, unit) for unit, name in units.items()}
    of_root |= of_all | settings.pop(module)
    if case.refused_first:
        attempt_to_wrap(case, module, of_root)
    if case.wrapping == "hand":
        for unit in inner_first(settings):
            wrapper = FSDP(unit, **of_all | settings[unit])
            for parent in list(module.modules()):
                for place, child in parent._modules.items():
                    if child is unit:
                        setattr(parent, place, wrapper)
        return FSDP(module, **of_root)
    chosen = {unit: own for unit, own in settings.items() if case.borders[units[unit]].chosen}
    policy = CustomPolicy(lambda inner: chosen.get(inner, False))
    if case.wrapping == "classes":
        policy = ModuleWrapPolicy(case.classes)
    return FSDP(module, auto_wrap_policy=policy, **of_root)


def attempt_to_wrap(case: Case, module: nn.Module, settings: dict[str, Any]) -> None:
    """Wrapping is refused as long as a parameter is held or has a hook, and changes nothing."""
    trained = [param for param in module.parameters() if param.requires_grad]
    if not trained:
        return
    param, names = random.Random(case.seed).choice(trained), dict(module.named_parameters())
    if case.refused_first == "optimizer" and case.in_rows:
        return  # it would get the DTensors
    if case.refused_first == "optimizer":
        optimizer = torch.optim.SGD([param], **SGD)
        with pytest.raises(RuntimeError, match="was built before wrapping"):
            FSDP(module, **settings)
        del optimizer
    else:
        register = {
            "hook": param.register_hook,
            "post hook": param.register_post_accumulate_grad_hook,
        }[case.refused_first]
        handle = register(lambda _: None)
        with pytest.raises(ValueError, match="has a hook"):
            FSDP(module, **settings)
        handle.remove()
    found = dict(module.named_parameters())
    assert list(found) == list(names) and all(found[name] is names[name] for name in names)


def own_settings(case: Case, name: str, unit: nn.Module) -> dict[str, Any]:
    """What one unit is told."""
    border = case.borders[name]
    hybrid = "HYBRID" in border.strategy.name
    settings = {
        "sharding_strategy": border.strategy,
        "process_group": groups(border) if hybrid else None,
    }
    if border.island and (case.wrapping == "hand" or not isinstance(unit, nn.BatchNorm1d)):
        settings["mixed_precision"] = MixedPrecision(cast_forward_inputs=True)
    return settings


def groups(border: Border) -> Groups:
    """With whom this rank shares a unit's parameters, and who has copies of its chunk."""
    if "HYBRID" in border.strategy.name:
        return grid(ranks_in_a_row(border, dist.get_world_size()))
    everybody = dist.group.WORLD
    return (None, everybody) if border.strategy.name == "NO_SHARD" else (everybody, None)


@cached_in_a_world
def grid(length: int) -> Groups:
    """This rank's row and column, with ranks in rows of this length."""
    world = list(range(dist.get_world_size()))
    rows = [world[start : start + length] for start in world[::length]]
    columns = [world[start::length] for start in range(length)]
    made = [(ranks, dist.new_group(ranks)) for ranks in rows + columns]
    row, column = (group for ranks, group in made if dist.get_rank() in ranks)
    return row, column


def seed_everything(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for GPUs, for a long time
    if device().type == "cuda":
        torch.cuda.manual_seed(seed)


# ------------------------------------------------------------------------------ everything twice


class Comparison:
    """A model and its reference, on this rank. Methods are called as the operations of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.reference = case, reference(case)
        self.model = by_function(case) if case.by_function else wrapped(case)
        self.plain: Any = self.model if case.by_function else self.model.module
        self.units = {unit.name: unit for unit in self.engine.units}
        if not case.compiled_first:
            compile_some(case, self.model, self.plain)
        module = self.model if case.optimizer_of == "model" else self.plain
        self.fused = "step" in case.after_hooks
        self.optimizer = None if self.fused else torch.optim.SGD(module.parameters(), **SGD)
        self.calls = Counter[object](), Counter[object]()  # of hooks, here and by the reference
        self.graphs: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = []
        self.at, self.events = 0, self.reference.events
        self.rng = random.Random(case.seed)  # the same on all ranks

    @property
    def engine(self) -> FeaturedEngine:
        """The model's. A module may have something else of that name."""
        found: FeaturedEngine = self.model._hooks.engine
        return found

    def run(self) -> None:
        assert self.units.keys() == self.reference.units.keys()
        self.hook_up()
        for at, op in enumerate(self.case.program):
            self.at, complaint = at, ""
            try:
                getattr(self, op.do.replace(" ", "_"))(op.number)
                self.compare()
            except Differs as error:
                complaint = str(error)
            if any(somewhere(bool(complaint))):  # so that no rank goes on alone
                raise Differs(
                    f"operation {at}, {op.do} {op.number}: {complaint or 'right on this rank'}"
                )

    def compare(self) -> None:
        """What this rank has of each unit is what the reference has there."""
        for name, unit in self.units.items():
            its = self.reference.units[name]
            if unit.mesh is None:
                size = unit.padded_shard.numel()
                own = slice(unit.shard_rank * size, unit.shard_rank * size + size)
                wholes = [its.flat]
            else:
                wholes = its.pieces(its.flat)
            grads = its.gradients()
            for param, whole, grad in zip(unit.optimized_params, wholes, grads, strict=True):
                found, found_grad = param, param.grad
                if unit.mesh is not None:
                    rows = -(-len(whole) // unit.shard_world_size)
                    own = slice(unit.shard_rank * rows, unit.shard_rank * rows + rows)
                    found = param.to_local()
                    found_grad = None if param.grad is None else param.grad.to_local()
                same(found, whole[own], "parameters of", unit.label)
                same(found_grad, None if grad is None else grad[own], "gradient of", unit.label)

    def hook_up(self) -> None:
        """Register the hooks of the case on parameters, and have the reference call the same."""
        trained = [name for name, unit in self.reference.units.items() if unit.flat.requires_grad]
        trained = [name for name in trained if self.reference.units[name].flat.numel()]
        here, there = self.calls
        for name in trained:
            if name in self.case.gradient_hooks:
                change = CHANGES[self.case.gradient_hooks[name]]
                for param in self.units[name].optimized_params:
                    param.register_hook(counted(change, here, name))
                self.reference.units[name].on_gradient.append(counted(change, there, name))
        params = {name: self.units[name].sharded_flat_param for name in trained}
        flats = {name: self.reference.units[name].flat for name in trained}
        kind = self.case.after_hooks
        if not kind:
            return
        own, its = after_hook(kind, params.values()), after_hook(kind, flats.values())
        if kind == "torch's step":
            _apply_optimizer_in_backward(torch.optim.SGD, params.values(), SGD)
            for name in trained:
                self.reference.units[name].after_gradient.append(its)
            return
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(counted(own, here, name, "after"))
            hook = counted(its, there, name, "after")
            self.reference.units[name].after_gradient.append(hook)

    def forward(self, variant: int) -> None:
        self.graphs.append(tuple((x, loss(out, variant)) for x, out in self.call()))

    def forward_that_fails(self, _: int) -> None:
        self.call(trap="forward")

    def backward(
        self, which: int, synchronize: bool = True, trap: str = "", keep: bool = False
    ) -> None:
        (x, found), (its_x, expected) = self.graphs[which]
        if not keep:
            del self.graphs[which]
        if self.fused and synchronize:
            self.graphs.clear()  # it steps
        if not expected.requires_grad:
            return  # everything is frozen
        with nullcontext() if synchronize else self.no_sync():
            failed = fails(trap, lambda: found.backward(retain_graph=keep))
        sent = self.has_sent()
        as_it_should = fails(
            trap, lambda: self.reference.backward(expected, synchronize, sent, keep)
        )
        assert failed == as_it_should
        if failed:
            self.events.add("a backward has failed")
            for calls in self.calls:
                calls.clear()  # on the way to where it failed, some hooks may have been called
        else:
            if self.calls[0] != self.calls[1]:
                raise Differs(f"calls of hooks: {self.calls[0]}, expected {self.calls[1]}")
            same(x.grad, its_x.grad, "gradient of the input")
            check_at_rest(self, kept=not synchronize)
        if synchronize and any(self.reference.waits()):
            self.events.add("a backward has reached nothing")
            self.zero_grad(0)  # or the step to come would be refused

    def has_sent(self) -> bool:
        """What waits since no_sync may stay, if a backward has reached no unit on any rank (as
        autograd.grad() for an input). Or it was sent, if nothing was saved of any unit either."""
        waits = any(unit.unreduced_grad is not None for unit in self.units.values())
        return not somewhere(waits)[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if not self.case.by_function:
            with self.model.no_sync():
                yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def backward_in_no_sync(self, which: int) -> None:
        self.backward(which, synchronize=False)

    def backward_that_fails(self, which: int) -> None:
        self.backward(which, trap="backward")

    def backward_that_keeps_its_graph(self, which: int) -> None:
        self.backward(which, synchronize=self.rng.random() < 0.7, keep=True)

    def penalize(self, which: int) -> None:
        """Add to a loss what its gradient for the input is long. That goes through all units, and
        gives their parameters nothing."""
        (x, found), (its_x, expected) = self.graphs[which]
        if not expected.requires_grad:
            return
        found = found + squares_of_gradient(found, x)
        sent = self.has_sent()
        penalty = self.reference.look(lambda: squares_of_gradient(expected, its_x), sent)
        expected = expected + penalty
        same(found, expected, "loss with the penalty")
        self.graphs[which] = (x, found), (its_x, expected)
        self.events.add("a gradient was penalized")

    def forget(self, which: int) -> None:
        del self.graphs[which]

    def evaluate(self, variant: int) -> None:
        modules = (self.model, self.reference.module)
        for module in modules:
            module.train(variant == 1)
        with torch.set_grad_enabled(variant == 2):
            self.call()
        for module in modules:
            module.train()

    def call(self, trap: str = "") -> list[tuple[Tensor, list[Tensor]]]:
        """Both on the same input: input and outputs. No outputs: it has failed."""
        seed = 1000 * self.case.seed + 10 * self.at + dist.get_rank()
        rows = 2 + self.at % 3  # else what is compiled would be so for 4 rows
        given = torch.randn(rows, self.case.width, generator=torch.Generator().manual_seed(seed))
        results = []
        for model in (self.model, self.reference):
            seed_everything(seed)  # for dropout
            x = given.to(device(), copy=True).requires_grad_(self.case.input_gradients)
            plain = self.plain if model is self.model else model.module
            results.append((x, outputs(model, plain, x, trap)))
        (_, found), (_, expected) = results
        assert len(found) == len(expected)
        for place, (a, b) in enumerate(zip(found, expected, strict=True)):
            same(a, b, "output", place)
        if not found:
            self.events.add("a forward has failed")
        return results

    def clip(self, variant: int) -> None:
        max_norm, norm_type = ((0.01, 2.0), (0.01, math.inf), (1e4, 1.0))[variant]
        if self.case.by_function and not self.takes_torchs_clip(norm_type):
            return
        if self.case.by_function:
            total = clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
            total = total.full_tensor() if isinstance(total, DTensor) else total
        else:
            total = self.model.clip_grad_norm_(max_norm, norm_type)
        grads = [unit.flat.grad for unit in self.reference.units.values()]
        grads = [grad for grad in grads if grad is not None and grad.numel()]
        norms = torch.tensor([0.0, *(grad.double().norm(norm_type) for grad in grads)])
        # A sum of a few hundred squares, in fp32 and in another order. After that the one that was
        # found is used for both, so that nothing else has to be tolerated.
        expected = float(norms.norm(norm_type))
        if not math.isclose(total, expected, rel_tol=1e-5):
            raise Differs(f"norm: {total}, expected {expected}")
        for grad in grads:
            grad.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))

    def takes_torchs_clip(self, norm_type: float) -> bool:
        """Whether torch's function takes all gradients: they are on one mesh, and for the largest
        element every rank has one of each."""
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        empty = any(not grad.to_local().numel() for grad in grads)
        one_mesh = len({id(grad.device_mesh) for grad in grads}) <= 1
        return one_mesh and not (norm_type == math.inf and somewhere(empty)[0])

    def step(self, _: int) -> None:
        self.graphs.clear()  # a backward through one of them would be refused now
        if self.optimizer is not None:
            self.optimizer.step()
            self.reference.step()

    def zero_grad(self, variant: int) -> None:
        through_module, how = divmod(variant, 3)
        if how < 2:  # else the next gradients are added to these
            owner = self.plain if through_module else self.optimizer or self.model
            owner.zero_grad(set_to_none=how == 0)
            self.reference.zero_grad(set_to_none=how == 0)

    def requires_grad_(self, variant: int) -> None:
        """Freeze the wrapped module, or thaw it; or one unit with what is inside of it."""
        one, frozen = divmod(variant, 2)
        name = self.rng.choice(list(self.units)) if one else ""
        for module in self.holders(self.units[name]) if one else [self.plain]:
            module.requires_grad_(not frozen)
        plain = self.reference.module.get_submodule
        below = {module for outer in name.split(", ") for module in plain(outer).modules()}
        for inner, unit in unit_names(self.case).items():
            if plain(inner) in below:
                self.reference.units[unit].train(not frozen)

    def holders(self, unit: FeaturedUnit) -> list[Any]:
        """The wrapper of a unit, or the modules that were given to ``fully_shard`` for it."""
        return [m for m in self.model.modules() if m.__dict__.get("_unit") is unit]

    def save(self, variant: int) -> None:
        model = self.plain if variant == 1 else self.model
        same_by_name(whole(model.state_dict()), self.reference.state_dict())

    def load(self, variant: int) -> None:
        state = {
            name: tensor * 0.75 if tensor.is_floating_point() else tensor + 1
            for name, tensor in self.model.state_dict().items()
        }
        (self.plain if variant == 1 else self.model).load_state_dict(state)
        self.reference.load_state_dict(whole(state))

    def save_states(self, variant: int) -> None:
        """Of the optimizer: by torch's function, of whole tensors or DTensors, or by FSDP's."""
        expected = self.reference.momenta()
        if not expected:
            return  # a step would be made, so that there is some
        found = whole_states(self.states(variant == 0))
        # Where there is no state yet, there may be zeros, which are the same to the next step.
        found = {name: value for name, value in found.items() if name in expected or value.any()}
        same_by_name(dict(sorted(found.items())), dict(sorted(expected.items())))

    def load_states(self, variant: int) -> None:
        if not self.reference.momenta():
            return
        state, frozen = self.states(variant == 0), set[str]()
        for of_param in state["state"].values():
            if (momentum := of_param["momentum_buffer"]) is not None:
                of_param["momentum_buffer"] = momentum * 0.75
        if self.case.by_function:
            # Not strict: torch wants one of each parameter, and what was not used has none.
            options = StateDictOptions(full_state_dict=variant == 0, strict=False)
            set_optimizer_state_dict(self.model, self.optimizer, state, options=options)
            # torch's function leaves out what is frozen: it stays as it is, or is lost.
            if variant != 0:
                self.reference.forget_frozen_momenta()
            frozen = {n for n, p in self.model.named_parameters() if not p.requires_grad}
        else:
            state = FSDP.optim_state_dict_to_load(self.model, self.optimizer, state)
            self.optimizer.load_state_dict(state)
        for name, momentum in self.reference.momenta().items():
            if name not in frozen:
                momentum *= 0.75

    def states(self, whole: bool) -> dict[str, Any]:
        """The optimizer's, under the names of parameters."""
        if self.case.by_function:
            options = StateDictOptions(full_state_dict=whole)
            return get_optimizer_state_dict(self.model, self.optimizer, options=options)
        kind = StateDictType.FULL_STATE_DICT if whole else StateDictType.SHARDED_STATE_DICT
        with FSDP.state_dict_type(self.model, kind):
            return FSDP.optim_state_dict(self.model, self.optimizer)

    def read(self, variant: int) -> None:
        with_grads = variant == 2 and not any(self.reference.waits())
        with FSDP.summon_full_params(
            self.model, writeback=False, offload_to_cpu=variant == 1, with_grads=with_grads
        ):
            found = dict(self.model.named_parameters())
            same_by_name(found, self.reference.named_parameters())
            if with_grads:
                grads = {name: p.grad for name, p in found.items() if p.grad is not None}
                same_by_name(grads, self.reference.named_gradients())

    def write(self, variant: int) -> None:
        with FSDP.summon_full_params(self.model, with_grads=variant == 2):
            for param in self.model.parameters():
                if variant == 1:
                    param.data = param.data * 0.75
                else:
                    param.data *= 0.75
                if variant == 2 and param.grad is not None:
                    param.grad *= 2
        self.reference.multiply(0.75, gradients=2 if variant == 2 else 1)

    # Each of these is refused. What is compared after it has to be as if it had not been tried.

    def refused(self, which: int) -> None:
        if self.case.by_function and REFUSED[which] != "a step that comes too early":
            return  # by other words, or not at all, as what is there are parameters
        units = list(self.units.values())
        places = [(u, *owner) for u in units for info in u.param_infos for owner in info.owners]
        unit, module, attribute = self.rng.choice(places)
        placeholder = getattr(module, attribute)
        match REFUSED[which]:
            case "data of a parameter" | "freezing a parameter" | "tying" if self.case.in_rows:
                pass  # it is a parameter there
            case "data of a parameter":
                with pytest.raises(RuntimeError, match="'data' cannot be set"):
                    placeholder.data = torch.zeros(placeholder.shape)
            case "freezing a parameter":
                with pytest.raises(RuntimeError, match="'requires_grad' cannot be set"):
                    placeholder.requires_grad = False
            case "another parameter":
                other = nn.Parameter(torch.zeros(2))
                if module is unit.module and self.rng.random() < 0.5:
                    with pytest.raises(RuntimeError, match="cannot be set or deleted here"):
                        setattr(self.holders(unit)[0], attribute, other)
                else:
                    with pytest.raises(RuntimeError, match="cannot be added or replaced"):
                        setattr(module, attribute, other)
            case "a parameter too many":
                with pytest.raises(RuntimeError, match="cannot be set or deleted here"):
                    self.holders(unit)[0].more = nn.Parameter(torch.zeros(2))
            case "another module":
                plain = [m for m in self.model.modules() if not isinstance(m, FSDP)]
                parent, name = self.rng.choice([(m, n) for m in plain for n in m._modules])
                with pytest.raises(RuntimeError, match="cannot be replaced"):
                    setattr(parent, name, nn.Linear(2, 2))
            case "tying":
                _, other, its_attribute = self.rng.choice(places)
                with pytest.raises(TypeError, match="cannot assign"):
                    setattr(module, attribute, getattr(other, its_attribute))
            case "another shape":
                refused = pytest.raises(ValueError, match="was replaced inside summon_full_params")
                with refused, FSDP.summon_full_params(self.model):
                    setattr(module, attribute, nn.Parameter(torch.zeros(*placeholder.shape, 2)))
            case "a step that comes too early":
                waits = any(unit.waiting is not None for unit in self.reference.units.values())
                if not any(somewhere(not waits)):
                    with pytest.raises(RuntimeError, match="wait to be reduced"):
                        self.optimizer.step()
                    self.events.add("a step came too early")


def in_place(grad: Tensor) -> None:
    grad.mul_(0.7)


Change = Callable[[Tensor], Tensor | None]
CHANGES: dict[str, Change] = {
    "look": lambda grad: None,
    "scale": lambda grad: grad * 0.3,
    "clamp": lambda grad: grad.clamp(-0.01, 0.01),
    "in place": in_place,
}
"""What hooks do to a gradient before the reduction. To each element by itself, as is promised."""


def counted(hook: Callable[[Any], Any], calls: Counter[object], *name: object) -> Any:
    def call(given: Tensor) -> Any:
        calls[name] += 1
        return hook(given)

    return call


def after_hook(kind: str, params: Iterable[nn.Parameter]) -> Callable[[nn.Parameter], None]:
    """What is done to a parameter when its gradient is there: by one hook for all of them."""
    optimizers = {param: torch.optim.SGD([param], **SGD) for param in params}

    def look(param: nn.Parameter) -> None:
        assert param.grad is not None and param.grad.shape == param.shape

    def scale(param: nn.Parameter) -> None:
        param.grad.mul_(0.5)

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    return {"look": look, "scale": scale}.get(kind, step)


class Outputs(list[Tensor]):
    """The main one first; none, if a trap has gone off."""

    kept: list[Tensor]  # by modules, in attributes


def outputs(model: Any, plain: nn.Module, x: Tensor, trap: str) -> Outputs:
    out = Outputs()
    keeping = [m for m in plain.modules() if isinstance(m, (Keeps, Penalized))]
    for module in keeping:
        module.kept = None  # it may not be called this time

    def call() -> None:
        main, side = split(model(x))
        out.extend([main, *side])
        out.kept = [m.kept for m in keeping if m.kept is not None]

    fails(trap, call)
    return out


def loss(out: Outputs, variant: int) -> Tensor:
    """Of the outputs that the variant of a forward says."""
    main, side = out[:1], out[1:]
    different = side if dist.get_rank() % 2 else main
    used = {ALL: out, MAIN: main, KEPT: out.kept, DIFFERENT: different}[variant]
    if all(tensor.grad_fn is None for tensor in used):
        used = out  # of a loss that knows nothing of the model nothing could be seen
    return sum(tensor.float().cos().mean() for tensor in used)


def squares_of_gradient(loss: Tensor, x: Tensor) -> Tensor:
    """Of the gradient for ``x``; 0 if there is none. It can be differentiated again."""
    (grad,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
    return torch.zeros(()) if grad is None else grad.pow(2).sum()


def fails(trap: str, do: Callable[[], object]) -> bool:
    """Whether a trap goes off."""
    try:
        with Trap.arm(trap):
            do()
    except Boom:
        return True
    return False


def same(found: Tensor | None, expected: Tensor | None, *what: object) -> None:
    name = " ".join(map(str, what))
    if found is None or expected is None:
        if found is not expected:
            raise Differs(f"{name}: {found}, expected {expected}")
    elif found.dtype != expected.dtype or found.shape != expected.shape:
        raise Differs(
            f"{name}: {list(found.shape)} of {found.dtype}, expected {list(expected.shape)} of "
            f"{expected.dtype}"
        )
    elif not ((found == expected) | (found.isnan() & expected.isnan())).all():
        gap = (found.double() - expected.double()).abs().max()
        raise Differs(f"{name}: off by {gap:.3g}, of at most {expected.abs().max():.3g}")


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """With whole tensors in place of DTensors."""
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}


def whole_states(state: dict[str, Any]) -> dict[str, Tensor]:
    """Of all parameters that have a momentum, whole ones."""
    momenta = {name: of["momentum_buffer"] for name, of in state["state"].items()}
    return whole({name: momentum for name, momentum in momenta.items() if momentum is not None})


def same_by_name(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if list(found) != list(expected):
        raise Differs(f"names: {list(found)}, expected {list(expected)}")
    for name in found:
        same(found[name], expected[name], name)


# ------------------------------------------------------------------------------------ many of them


def check(seed: int) -> set[str]:
    """One case, on this rank. Returns what has happened that not every case has."""
    case = random_case(seed)
    with compiling() if case.compiled else nullcontext():
        comparison = Comparison(case)
        comparison.run()
        if case.compiled and torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            comparison.events.add("a module was compiled")
    return comparison.events


@contextmanager
def compiling() -> Iterator[None]:
    """For one case: nothing of another's, and a graph for each Linear of its sizes."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def failure(seed: int, world: int, timeout: float = 60) -> str | None:
    """One case, on all ranks: what it was, what went wrong, and how to see it again; or None."""
    try:
        run(check, world, seed, timeout=timeout)
    except RankFailure as error:
        again = f"python -m tests.fuzz 1 --seed {seed} --world {world}"
        return f"{describe(random_case(seed), world)}\n\n{error}\n\nTo see it again: {again}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--world", type=int, nargs="+", default=WORLDS, help="numbers of ranks")
    args = parser.parse_args()
    end_tidily()
    failed, start, told = [], time.monotonic(), 0.0
    for done, seed in enumerate(range(args.seed, args.seed + args.cases), 1):
        world = args.world[seed % len(args.world)]
        complaint = failure(seed, world)
        if complaint:
            failed.append(seed)
            print(f"\n{complaint}\n", flush=True)
        seconds = time.monotonic() - start
        if seconds > told + 10 or done == args.cases:
            told = seconds
            print(
                f"{done} of {args.cases} cases, {len(failed)} failed, {seconds:.0f} s", flush=True
            )
    if failed:
        sys.exit(f"seeds that failed: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
