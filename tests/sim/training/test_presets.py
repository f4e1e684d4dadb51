"""sim/training/presets.py: models by name."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minifsdp.sim.__main__ import main
from minifsdp.sim.training.models import Block, Job
from minifsdp.sim.training.presets import MODELS, find


class FakeConfig:
    """As transformers' classes are used here."""

    @classmethod
    def from_json_file(cls, path: str) -> "FakeConfig":
        return cls(**json.loads(Path(path).read_text()))

    def __init__(self, width: int) -> None:
        self.width = width


class FakeEmbeddings(nn.Embedding):
    pass


class FakeModel(nn.Module):
    config_class = FakeConfig
    _no_split_modules = ("FakeEmbeddings", "Block")

    def __init__(self, config: FakeConfig) -> None:
        super().__init__()
        self.embeddings = FakeEmbeddings(100, config.width)
        self.blocks = nn.Sequential(
            *(Block(config.width, 2, 4 * config.width, True, False) for _ in range(3))
        )
        self.head = nn.Linear(config.width, 100, bias=False)
        self.head.weight = self.embeddings.weight

    def forward(self, input_ids, labels, use_cache):
        assert not use_cache and labels.shape == input_ids.shape == (8, 16)
        return SimpleNamespace(loss=self.head(self.blocks(self.embeddings(input_ids))).sum())


SIZES = {
    "gpt-125m": 125e6, "gpt-1.3b": 1.3e9, "gpt-2.7b": 2.7e9, "gpt-7b": 7e9, "gpt-13b": 13e9,
    "gpt-30b": 30e9,
    "t5-500m": 500e6, "roberta-1gb": 250e6, "vit-h": 632e6,
    "gpt-175b": 175e9, "mpt-125m": 125e6, "mpt-350m": 356e6, "mpt-760m": 760e6, "mpt-1b": 1.3e9,
    "mpt-3b": 2.7e9, "mpt-7b": 6.7e9, "mpt-13b": 13e9, "mpt-30b": 30e9,
    "mpt-70b": 64.9e9, "llama2-7b": 6.74e9, "llama2-13b": 13.02e9, "llama2-34b": 33.74e9,
    "llama2-70b": 68.98e9,
    "llama3-8b": 8.03e9, "llama3-70b": 70.55e9,
}  # fmt: skip


@pytest.mark.few(8)
@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_the_size_of_its_name(name):
    with torch.device("meta"):
        model = MODELS[name].build()
        # Of Llama the papers give the number of parameters, of the others a round figure.
        near = 0.001 if name.startswith("llama") else 0.12
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(SIZES[name], rel=near)
        assert any(isinstance(module, MODELS[name].blocks) for module in model.modules())
        assert MODELS[name].loss(model, 2, 16).shape == ()


def mine() -> Job:
    return Job(lambda: nn.Linear(3, 3), (nn.Linear,), lambda model, batch, length: model)


def not_a_job() -> int:
    return 3


def raises() -> nn.Module:
    return ()[0]


def test_a_preset_with_other_sizes():
    """TinyLlama has 1.1 billion parameters."""
    tiny = {"width": 2048, "layers": 22, "kv_heads": 4, "hidden": 5632}
    with torch.device("meta"):
        model = find("llama2-7b", changes=tiny).build()
        small = find("gpt-125m", changes={"vocab": 1000, "layers": 3}).build()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.1e9, rel=0.001)
    assert small.tokens.weight.shape == (1000, 768) and len(small.blocks) == 3


def test_a_job_of_ones_own_is_found_by_its_module():
    assert find("gpt-7b") is MODELS["gpt-7b"]
    assert isinstance(find("tests.sim.training.test_presets:mine").build(), nn.Linear)


@pytest.mark.parametrize(
    "name, match",
    [
        ("gpt-8b", r"'gpt-8b' is not known\. There are gpt-125m, "),
        (":model", "':model' is not known"),
        ("tests:", "'tests:' is not known"),
        ("no.such:model", "there is no module 'no'. It is looked for in the current directory and"),
        ("tests.no:model", r"there is no module 'tests\.no'"),
        ("./models.py:gpt", r"without folders and \.py: models:gpt\. It is looked for in"),
        ("models.py:gpt", r"without folders and \.py: models:gpt\. It is looked for in"),
        (
            "tests.sim.training.test_presets:missing",
            "test_presets has nothing of the name 'missing'",
        ),
        ("tests.sim.training.test_presets:SIZES", "has dict, no callable, of the name 'SIZES'"),
        (
            "tests.sim.training.test_presets:not_a_job",
            r"not_a_job\(\) returned int, neither an nn.Module",
        ),
        (
            "tests.sim.training.test_presets:raises",
            r"fails in raises\(\): IndexError: tuple index out of",
        ),
    ],
)
def test_what_is_no_model_is_refused(name, match):
    with pytest.raises(ValueError, match=match):
        find(name)


@pytest.fixture
def transformers(monkeypatch):
    fake = SimpleNamespace(FakeModel=FakeModel, AutoTokenizer=object)
    monkeypatch.setitem(sys.modules, "transformers", fake)


def test_a_model_of_transformers(transformers, tmp_path, capsys):
    """Blocks are what transformers never splits, without the embeddings, which share a weight."""
    config = tmp_path / "config.json"
    config.write_text('{"width": 8}')
    job = find("hf:FakeModel", str(config))
    assert job.blocks == (Block,)
    assert main(["--model", "hf:FakeModel", "--config", str(config), "--seq", "16"]) == 0
    assert "peak reserved" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, config, message",
    [
        ("AutoTokenizer", "", "transformers has no model of this name"),
        ("FakeModel", "nowhere.json", "--config 'nowhere.json' is not FakeModel's configuration"),
    ],
)
def test_what_is_no_model_of_transformers_is_refused(transformers, name, config, message):
    with pytest.raises(ValueError, match=message):
        find(f"hf:{name}", config)


def test_without_transformers_one_hears_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        find("hf:LlamaForCausalLM")
