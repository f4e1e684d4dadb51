"""Wrong versions of each concept, and whether that concept's tests notice: `make mutants`.

    python -m tests.mutants                # all of them, a few minutes
    python -m tests.mutants limiter hooks  # those of some files

A test that no wrong implementation can fail is a defect. Each mutant here is one plausible mistake,
as a piece of source text and what to put in its place; it counts as noticed when
`tests/test_<concept>.py` fails on a copy of the repository with the mistake in it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    concept: str
    mistake: str
    original: str  # occurs once in minifsdp/<concept>.py
    replacement: str


MUTANTS = [
    Mutant("flatten", "views are copies", "piece.view(shape)", "piece.clone().view(shape)"),
    Mutant("flatten", "in memory order", ".detach().reshape(-1)", ".detach().t().reshape(-1)"),
    Mutant("flatten", "dtypes not checked", '"dtype": "Convert', '"shape": "Convert'),
    Mutant("flatten", "padding comes first", "zip(pieces, shapes", "zip(pieces[::-1], shapes"),
    Mutant("shard", "rounds down", "-(-numel // world_size)", "numel // world_size"),
    Mutant("shard", "a view, not a copy", "chunk[:real] = flat[rank * size : rank * size + real]",
           "chunk = flat[rank * size : (rank + 1) * size] if real == size else chunk"),
    Mutant("shard", "padding counts as data", "min(max(numel - rank * chunk, 0), chunk)", "chunk"),
    Mutant("shard", "padding is not cleared", "flat.new_zeros(size)", "flat.new_ones(size)"),
    Mutant("unit", "the optimizer gets the padding",
           "self.chunk[: real_numel(self.numel, self.rank, self.ranks)]", "self.chunk[:]"),
    Mutant("unit", "collectives write through autograd's tensor",
           "self.buffer = self.full.data", "self.buffer = self.full.detach()"),
    Mutant("unit", "a replaced shard is not noticed",
           "shard.data_ptr() != self.chunk.data_ptr()", "False"),
    Mutant("unit", "the originals stay alive", "self.slots = slots", "self.slots, self.p = slots, params[:]"),
    Mutant("unit", "freezing is not noticed",
           "self.full.requires_grad != shard.requires_grad", "False"),
    Mutant("unshard", "computes before the data is there", "unit.gathered.wait()", "pass"),
    Mutant("unshard", "waits where it should only start",
           "unit.gathered = streams.unshard.submit(launch)",
           "unit.gathered = streams.unshard.submit(launch); unit.gathered.wait()"),
    Mutant("unshard", "gathers the wrong tensor",
           "all_gather(unit.buffer, unit.chunk,", "all_gather(unit.buffer, unit.chunk * 0,"),
    Mutant("unshard", "does not say that it is gathering",
           "unit.memory = Memory.GATHERING", "unit.memory = Memory.UNSHARDED"),
    Mutant("reshard", "nothing is freed", "unit.resize_storage(0)", "pass"),
    Mutant("reshard", "frees what is still being gathered", "unit.gathered.wait()", "pass"),
    Mutant("reshard", "modules keep their views", "unit.hide()", "pass"),
    Mutant("reduce", "a sum, not a mean", "shards, 1 / shards.size(), unit.tag", "shards, 1.0, unit.tag"),
    Mutant("reduce", "overwrites what is there", "shard.grad.add_(grad)", "shard.grad = grad"),
    Mutant("reduce", "a copy too many", "shard.grad = grad", "shard.grad = grad.clone()"),
    Mutant("reduce", "replicas are not reduced",
           "return all_reduce(grad, replicas, 1 / replicas.size())", "return lambda: None"),
    Mutant("streams", "the host waits at once", "return CpuEvent(launch())",
           "finish = launch(); finish(); return CpuEvent()"),
    Mutant("streams", "finishes once for everybody who waits",
           "finish, self._finish = self._finish, None", "finish = self._finish"),
    Mutant("streams", "finishes outside of its stream", "launch()()", "launch()"),
    Mutant("streams", "one stream does not wait for another", "        event.synchronize()", "        pass"),
    Mutant("streams", "the allocator is not told", "tensor.record_stream(self._stream)", "pass"),
    Mutant("collectives", "in the order of ranks",
           "addends = [*received, own]", "addends = [own.clone(), *received[::-1]]"),
    Mutant("collectives", "does not scale its own part", "total.mul_(scale)", "pass"),
    Mutant("collectives", "chunks in the wrong places",
           "_exchange(chunk, to, parts[source]", "_exchange(chunk, to, parts[to]"),
    Mutant("collectives", "waits for the others at the start",
           "    parts[rank].copy_(chunk)  #", "    [work.wait() for work in works]\n    parts[rank].copy_(chunk)  #"),
    Mutant("collectives", "all-reduces and keeps a slice", "    if _native(flat):",
           "    if True:\n        flat.mul_(scale)\n        dist.all_reduce(flat, group=group)\n"
           "        return own.clone(), lambda: None\n    if _native(flat):"),
    Mutant("limiter", "takes one event off, as torch does",
           "while len(self._freeing) > max(room, 0):", "if len(self._freeing) >= self.limit:"),
    Mutant("limiter", "admits every prefetch", "if room < 0 and not needed:", "if False:"),
    Mutant("limiter", "one too many", "self.limit - others - 1", "self.limit - others"),
    Mutant("limiter", "counts the units around", "u not in unit.enclosing", "True"),
    Mutant("limiter", "marks waits that did not happen", "if not event.query():", "if True:"),
    Mutant("limiter", "does not wait", "            event.synchronize()", "            pass"),
    Mutant("limiter", "counts units that stay", "u.reshard_after_forward and", "True and"),
    Mutant("prefetch", "for ever torch's guess", "if not order.last:", "if True:"),
    Mutant("prefetch", "looks from the start",
           "rest = self.last[self._position :]", "self._position = 0; rest = self.last"),
    Mutant("prefetch", "gathers what is over", "elif target.phase is Phase.DONE:", "elif False:"),
    Mutant("prefetch", "half an order counts", "self.current = []\n\n    def visit", "pass\n\n    def visit"),
    Mutant("prefetch", "the guess is the order of the forward", "reversed(self.post_forward_order.current)", "self.post_forward_order.current"),
    Mutant("prefetch", "the wrong unit is not counted", 'self.mistargets["not needed yet"] +=', 'self.mistargets["not needed yet"] *='),
    Mutant("engine", "gathers before the optimizer has written",
           "self.streams.unshard.wait_event(self.streams.compute.record_event())", "pass"),
    Mutant("engine", "reductions pile up", "self._reductions[-1].event.wait()", "pass"),
    Mutant("engine", "some of a backward's gradients",
           "            reduction.event.wait()\n        for reduction in self._reductions:\n", "            reduction.event.wait()\n"),
    Mutant("engine", "the limiter is not told of a free",
           "self.limiter.freed(unit, reshard(unit, self.streams))", "reshard(unit, self.streams)"),
    Mutant("nest", "dicts are not looked into", "stack.extend(item.values())", "pass"),
    Mutant("nest", "dataclasses are not looked into",
           "stack.extend(getattr(item, field.name) for field in fields(item))", "pass"),
    Mutant("nest", "circles never end", "seen.add(id(item))", "pass"),
    Mutant("nest", "plain objects are not looked into", "stack.extend(vars(item).values())", "pass"),
    Mutant("hooks", "only the root ends a backward",
           "        if self.in_backward:\n            return\n        self._forget", "        if self.in_backward or self.engine.root.phase is not Phase.BACKWARD:\n            return\n        self._forget"),
    Mutant("hooks", "a dead backward is taken for a living one",
           "return self._backward is not None and self._backward() is not None", "return self._backward is not None"),
    Mutant("hooks", "the gradient stays where autograd adds",
           "grad, unit.full.grad = unit.full.grad, None", "grad = unit.full.grad"),
    Mutant("hooks", "units around are not gathered",
           "if other.phase is Phase.FORWARD]", "if False]"),
    Mutant("hooks", "a checkpoint's recomputation frees",
           "return unit.phase is Phase.BACKWARD", "return False"),
    Mutant("hooks", "a step in between goes unnoticed", "if unit.shard._version != version:", "if False:"),
    Mutant("hooks", "frozen units wait for the end", "        if inputs:", "        if False:"),
    Mutant("hooks", "old views, so that autograd runs them last", "unit.make_views()", "unit.views or unit.make_views()"),
    Mutant("hooks", "a failed forward is not cleaned up", "            self.engine.reset()\n            self.prefetcher.forget()\n        elif", "            pass\n        elif"),
    Mutant("hooks", "gradients of gradients go unnoticed", "if grad.requires_grad:", "if False:"),
    Mutant("wrap", "the root is wrapped twice", "    seen = {root}\n", "    seen = set()\n    selected += [root] * policy(module=root, recurse=False, nonwrapped_numel=0)\n"),
    Mutant("wrap", "sharing across units goes unnoticed", "if owner is not unit:", "if False:"),
    Mutant("wrap", "an inner unit's parameter goes unnoticed", "if taken is not None:", "if False:"),
    Mutant("wrap", "one place of two is wrapped", "                setattr(parent, name, wrapped)", "                setattr(parent, name, wrapped); break"),
    Mutant("wrap", "optimizers are not looked for", "if issubclass(type(candidate), Optimizer):", "if False:"),
    Mutant("wrap", "a shared parameter gets two places", "slots.setdefault(param, Slot(name, param.shape))", "slots.setdefault(nn.Parameter(param.data), Slot(name, param.shape))"),
    Mutant("full_params", "changes are lost", "    unit.chunk.copy_(", "    unit.chunk.clone().copy_("),
    Mutant("full_params", "changes are always kept", "if writeback:", "if True:"),
    Mutant("full_params", "a replaced tensor is lost", "if param.data_ptr() != view.data_ptr():", "if False:"),
    Mutant("full_params", "a second name is not looked at", "        for module, attribute in slot.owners:\n            param =", "        for module, attribute in slot.owners[:1]:\n            param ="),
    Mutant("full_params", "replaced only where it is sharded", "        for module, attribute in slot.owners:\n            param =", "        for module, attribute in slot.owners * unit.sharded:\n            param ="),
    Mutant("full_params", "nothing is put back after an exception", "            _unregister(unit)\n            engine.free(unit)", "            pass"),
    Mutant("full_params", "allowed anywhere", "if not hooks.idle or hooks.summoned:", "if False:"),
    Mutant("fully_sharded", "one counter of tags for all groups", "_tags[group.group_name]", '_tags[""]'),
    Mutant("fully_sharded", "units around are not known", "if outer is not wrapper and", "if False and"),
    Mutant("fully_sharded", "names keep the wrapper's", "yield clean(name), param", "yield name, param"),
    Mutant("fully_sharded", "a former root is not cleaned up", "wrapper._hooks.engine.reset()", "pass"),
    Mutant("fully_sharded", "unknown arguments are ignored", "if value is not None and value is not False:", "if False:"),
]  # fmt: skip


def notices(mutant: Mutant) -> str | None:
    """The first test that fails on the mutant, or None."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in ("minifsdp", "tests", "tutorials", "pyproject.toml"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(folder, name))
        path = Path(folder, "minifsdp", f"{mutant.concept}.py")
        path.write_text(path.read_text().replace(mutant.original, mutant.replacement))
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", f"tests/test_{mutant.concept}.py"],
            cwd=folder,
            env={**os.environ, "RANKS_TIMEOUT": "15", "PYTHONPATH": folder},
            capture_output=True,
            text=True,
        )
    if result.returncode not in (0, 1):
        return f"(did not run: {result.stdout[-300:]}{result.stderr[-300:]})"
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    return failed[0].split("::")[-1].split(" - ")[0] if failed else None


def main(concepts: list[str]) -> None:
    chosen = [m for m in MUTANTS if not concepts or m.concept in concepts]
    unnoticed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, test in zip(chosen, pool.map(notices, chosen), strict=True):
            unnoticed += test is None or test.startswith("(")
            print(f"{mutant.concept:14} {mutant.mistake:46} {test or 'NOT NOTICED'}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} mutants noticed")
    sys.exit(unnoticed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
