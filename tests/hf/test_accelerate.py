"""accelerate and transformers' Trainer, with minifsdp in the place of torch's FSDP1 and FSDP2.

Both make the wrapper themselves, clip by it, and save and load through its state dicts. Needs
`make test-hf`, or `pip install -e ".[hf]"`.

From a sharded checkpoint accelerate loads what `FSDP.optim_state_dict(model, optimizer)` has. With
torch's class that is nothing before the optimizer's first step, and a run that was resumed goes on
without its moments.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

WHY = "accelerate and Trainer: `make test-hf` installs what they need"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

import accelerate
import torch
import torch.distributed as dist
import transformers as hf
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from tests.hf.models import WORDS, batch, blocks, make
from tests.ranks import device, on_ranks

NAME = "llama"
by_kind = pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
by_layout = pytest.mark.parametrize("rows", [False, True], ids=["chunks", "rows"])


@contextmanager
def in_place_of_torchs() -> Iterator[None]:
    """Both libraries import torch's class where they use it, by one of these two names."""
    name = "FullyShardedDataParallel"
    with (
        patch(f"torch.distributed.fsdp.{name}", FSDP),
        patch(f"torch.distributed.fsdp.fully_sharded_data_parallel.{name}", FSDP),
    ):
        yield


@contextmanager
def launched() -> Iterator[None]:
    """What a launcher tells a rank. At the end nothing is left of what accelerate knew."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    told["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    with patch.dict(os.environ, told), patch.object(AcceleratorState, "__init__", fsdp_on_a_cpu):
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


def fsdp_on_a_cpu(state: AcceleratorState, *args: Any, **settings: Any) -> None:
    """accelerate takes up a plugin for FSDP only where there are GPUs."""
    AS_IT_IS(state, *args, **settings)
    plugin = settings.get("fsdp_plugin")
    if plugin is not None and device().type == "cpu":
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        state.fsdp_plugin = plugin


AS_IT_IS = AcceleratorState.__init__


def layers() -> list[str]:
    return [cls.__name__ for cls in blocks(make(NAME))]


@by_layout
@on_ranks(2)
def test_trainer_decays_what_it_decays_of_the_plain_model(rows):
    def decayed(model: nn.Module) -> list[str]:
        names = hf.Trainer.get_decay_parameter_names(None, model)
        return sorted(str(name) for name, _ in model.named_parameters() if name in names)

    expected = decayed(make(NAME))
    policy = minifsdp.ModuleWrapPolicy(blocks(make(NAME)))
    model = FSDP(make(NAME).to(device()), auto_wrap_policy=policy, use_orig_params=rows)
    if rows:
        assert decayed(model) == expected
    else:  # each flat parameter as a whole, as with torch's
        with pytest.warns(UserWarning, match="a part of the flat parameter"):
            assert decayed(model) == sorted(name for name, _ in model.named_parameters())


# ------------------------------------------------------------------------------------ accelerate


def prepared(accelerator: accelerate.Accelerator) -> tuple[nn.Module, Any]:
    model = accelerator.prepare(make(NAME))
    assert isinstance(model, FSDP)
    return model, accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(accelerator: accelerate.Accelerator, model: nn.Module, optimizer: Any) -> list[Tensor]:
    losses = []
    for step in range(4):
        with accelerator.accumulate(model):
            loss = model(**batch(NAME, step)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                assert accelerator.clip_grad_norm_(model.parameters(), 0.1) > 0
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@by_layout
@by_kind
@pytest.mark.parametrize("precision", ["no", "bf16"])
@on_ranks(2)
def test_what_accelerate_saves_another_run_goes_on_with(precision, kind, rows, tmp_path):
    with in_place_of_torchs(), launched():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1, auto_wrap_policy="transformer_based_wrap", use_orig_params=rows,
            transformer_cls_names_to_wrap=layers(), state_dict_type=kind,
        )  # fmt: skip
        accelerator = accelerate.Accelerator(
            fsdp_plugin=plugin, cpu=device().type == "cpu", mixed_precision=precision,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer)
        accelerator.save_state(tmp_path)
        saved = accelerator.get_state_dict(model)
        expected = train(accelerator, model, optimizer)
        accelerator.free_memory()
        model, optimizer = prepared(accelerator)
        accelerator.load_state(tmp_path)
        assert torch.equal(torch.stack(train(accelerator, model, optimizer)), torch.stack(expected))
    assert bool(saved) == (dist.get_rank() == 0)
    if saved:
        plain = make(NAME)
        before = plain.lm_head.weight.clone()
        assert plain.load_state_dict(saved) == ([], [])
        assert not torch.equal(plain.lm_head.weight, before)


@by_layout
@on_ranks(2)
def test_a_model_and_its_optimizer_may_be_prepared_in_one_call(rows):
    """In rows; in chunks accelerate says that one is to prepare the model first, and so do we."""
    with in_place_of_torchs(), launched():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1, auto_wrap_policy="transformer_based_wrap", use_orig_params=rows,
            transformer_cls_names_to_wrap=layers(),
        )  # fmt: skip
        accelerator = accelerate.Accelerator(
            fsdp_plugin=plugin, cpu=device().type == "cpu", gradient_accumulation_steps=2
        )
        expected = train(accelerator, *prepared(accelerator))
        accelerator.free_memory()
        plain = make(NAME)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        if rows:
            model, optimizer = accelerator.prepare(plain, optimizer)
            found = train(accelerator, model, optimizer)
            assert torch.equal(torch.stack(found), torch.stack(expected))
        else:
            with pytest.raises(RuntimeError, match=r"AdamW\) was built before wrapping"):
                accelerator.prepare(plain, optimizer)


@contextmanager
def in_place_of_torchs_fsdp2() -> Iterator[None]:
    with (
        patch("torch.distributed.fsdp.fully_shard", minifsdp.fully_shard),
        patch("torch.distributed.fsdp.FSDPModule", minifsdp.FSDPModule),
    ):
        yield


def by_fsdp2(name: str, folder: Path, precision: str, settings: dict[str, Any]) -> list[Tensor]:
    """The losses of a run that is saved in the middle. Another one goes on from there alike."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=layers(), **settings,
    )  # fmt: skip
    accelerator = accelerate.Accelerator(
        fsdp_plugin=plugin, cpu=device().type == "cpu", mixed_precision=precision,
        gradient_accumulation_steps=2,
    )  # fmt: skip

    def prepared() -> tuple[nn.Module, Any]:
        plain = make(name)
        return accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))

    model, optimizer = prepared()
    found = train(accelerator, model, optimizer)
    accelerator.save_state(folder)
    expected = train(accelerator, model, optimizer)
    accelerator.free_memory()
    model, optimizer = prepared()
    assert type(model.lm_head).__name__ == "FSDPLinear"  # with the norm, one unit
    accelerator.load_state(folder)
    assert torch.equal(torch.stack(train(accelerator, model, optimizer)), torch.stack(expected))
    return found + expected


FSDP2 = {
    "free": {},
    "keep": {"reshard_after_forward": False},
    "meta": {"cpu_ram_efficient_loading": True},  # then load_state_dict(assign=True)
}


@pytest.mark.parametrize("settings", FSDP2.values(), ids=FSDP2.keys())
@pytest.mark.parametrize("name", [NAME, "llama, tied"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@on_ranks(2, timeout=120)
def test_accelerates_fsdp2_is_bit_equal_to_torchs(precision, name, settings, tmp_path):
    """It gives fully_shard the norm and the head (and the embedding, if tied) as a list."""
    settings = {**settings, "state_dict_type": "SHARDED_STATE_DICT"}
    with launched():
        expected = by_fsdp2(name, tmp_path / "torch", precision, settings)
    with in_place_of_torchs_fsdp2(), launched():
        found = by_fsdp2(name, tmp_path / "ours", precision, settings)
    assert torch.equal(torch.stack(found), torch.stack(expected))


# --------------------------------------------------------------------------------------- Trainer

GENERATOR = torch.Generator().manual_seed(0)
TEXTS = torch.randint(3, WORDS, (32, 10), generator=GENERATOR)
DATA = [{"input_ids": text, "labels": text} for text in TEXTS]


def trainer(folder: Path, **settings: Any) -> hf.Trainer:
    args = hf.TrainingArguments(
        str(folder), use_cpu=device().type == "cpu", per_device_train_batch_size=2, max_steps=6,
        gradient_accumulation_steps=2, learning_rate=1e-2, max_grad_norm=0, save_steps=3,
        report_to=[], disable_tqdm=True, ddp_backend=dist.get_backend(), **settings,
    )  # fmt: skip
    return hf.Trainer(make(NAME), args, train_dataset=DATA)


def learned(folder: Path) -> dict[str, Tensor]:
    return hf.LlamaForCausalLM.from_pretrained(folder).state_dict()


@by_layout
@by_kind
@on_ranks(2, timeout=120)
def test_trainer(kind, rows, tmp_path):
    """It trains as with DistributedDataParallel, and goes on from its checkpoints."""
    with launched():
        ddp = trainer(tmp_path / "ddp")
        ddp.train()
        ddp.save_model()
    config = {
        "version": 1, "transformer_layer_cls_to_wrap": layers(), "use_orig_params": rows,
        "state_dict_type": kind, "sync_module_states": device().type != "cpu",
    }  # fmt: skip
    for resumed in (False, True):
        with in_place_of_torchs(), launched():
            ours = trainer(tmp_path / "ours", fsdp=True, fsdp_config=dict(config))
            ours.train(str(tmp_path / "ours/checkpoint-3") if resumed else None)
            assert isinstance(ours.model_wrapped, FSDP) and ours.state.global_step == 6
            ours.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
            ours.save_model()
        dist.barrier()
        expected, found = learned(tmp_path / "ddp"), learned(tmp_path / "ours")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
        dist.barrier()
