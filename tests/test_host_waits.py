"""How often the host waits for the GPU, counted on a pretended one: the table in testing.md.

A host that waits has nothing queued when the GPU is done, so a step must not do it. What the
limiter and an offloaded gradient wait for are events, which are not counted here.
"""

from collections.abc import Callable

import torch

from minifsdp import CPUOffload, ModuleWrapPolicy
from minifsdp import FullyShardedDataParallel as FSDP
from tests.pretended_gpu import PretendedGpu
from tests.ranks import run
from tests.small import Block, batch, layers
from tutorials.exercises.catalog import ROOT

BLOCKS = 4  # with the root five units, of ten parameters
HOW = {
    "chunks": (False, False),
    "rows": (True, False),
    "chunks, offload": (False, True),
    "rows, offload": (True, True),
}


def count(rows: bool, offload: bool) -> dict[str, int]:
    """How often each of them lets this rank wait."""
    model = FSDP(
        layers(BLOCKS),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=rows,
        cpu_offload=CPUOffload(offload),
    )
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-3), batch()

    def step() -> None:
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def accumulate() -> None:
        with model.no_sync():
            model(x).pow(2).sum().backward()
        step()

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    def look() -> None:
        with FSDP.summon_full_params(model):
            pass

    found = {"the first step": waits(step), "the second step": waits(step)}
    found["each later step"] = max(waits(step) for _ in range(3))
    accumulate()
    found["a step that `no_sync` has begun"] = waits(accumulate)
    found["an evaluation"] = waits(evaluate)
    model(x).pow(2).sum().backward()
    found["`clip_grad_norm_`"] = waits(lambda: model.clip_grad_norm_(1.0))
    found["`summon_full_params`"] = waits(look)
    found["`state_dict`"], state = waits(model.state_dict), model.state_dict()
    found["`load_state_dict`"] = waits(lambda: model.load_state_dict(state))
    found["`optim_state_dict`"] = waits(lambda: FSDP.optim_state_dict(model, optimizer))
    return found


def waits(action: Callable[[], object]) -> int:
    """How often the host waits for the GPU in a call."""
    gpu = PretendedGpu.current
    gpu.waits.clear()
    action()
    return len(gpu.waits)


def test_the_host_waits_as_often_as_the_readme_says():
    found = [run(count, 2, *how, pretended_gpu=True)[0] for how in HOW.values()]
    rows = [f"| {what} | {' | '.join(str(each[what]) for each in found)} |" for what in found[0]]
    table = "\n".join([f"| | {' | '.join(HOW)} |", "| --- |" + " ---: |" * len(HOW), *rows])
    assert table in (ROOT / "tutorials/reference/testing.md").read_text(), (
        f"testing.md does not have\n{table}"
    )


def test_a_wait_is_counted():
    with PretendedGpu() as gpu:
        torch.ones(1, device="cuda").item()
    assert gpu.waits == ["aten._local_scalar_dense.default"]
