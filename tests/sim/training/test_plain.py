"""sim/training/plain.py: a module of one's own, of which nothing else is said."""

import json

import pytest
import torch
from torch import nn

from minifsdp.sim.__main__ import main
from minifsdp.sim.training.plain import job_of, repeated, tried


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.mlp(x)


class Language(nn.Module):
    """Tokens in, logits out, as a tensor or in an object."""

    def __init__(self, wrapped: bool = False) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(100, 16), nn.Linear(16, 100)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.wrapped = wrapped

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)} if self.wrapped else self.head(x)


class Bottleneck(nn.Module):
    """A block of a ResNet, arXiv:1512.03385."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)
        self.conv = nn.Conv2d(width // 4, width // 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm(self.up(self.conv(self.down(x)))))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 64, 7, 4), nn.AdaptiveAvgPool2d(1)
        self.first = nn.Sequential(Bottleneck(64), Bottleneck(64))
        self.wider = nn.Conv2d(64, 128, 1)
        self.second = nn.Sequential(Bottleneck(128), Bottleneck(128), Bottleneck(128))
        self.head = nn.Linear(128, 10)

    def forward(self, pictures):
        x = self.second(self.wider(self.first(self.stem(pictures))))
        return self.head(self.pool(x).flatten(1))


def floats() -> nn.Module:
    return nn.Sequential(nn.Linear(588, 32), nn.ReLU(), nn.Linear(32, 10))


def frozen() -> nn.Module:
    return Language().requires_grad_(False)


class Broken(nn.Linear):
    def forward(self, x):
        raise KeyError("mask")


def broken() -> nn.Module:
    return Broken(4, 4)


@pytest.mark.parametrize(
    "module, expected",
    [
        (Language, (Layer, 3)),  # and not the two Linears that are in each
        (Vision, (Bottleneck, 5)),  # of two lists
        (floats, (nn.Linear, 2)),
        (
            lambda: nn.Sequential(nn.ModuleList([nn.LayerNorm(9), nn.LayerNorm(9)]), floats()),
            (nn.Linear, 2),
        ),
        (lambda: nn.Linear(3, 3), (None, 0)),
        (lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), (None, 0)),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (None, 0)),  # one of each
    ],
)
def test_blocks_are_the_class_that_is_repeated(module, expected):
    assert repeated(module()) == expected


def test_logits_have_a_cross_entropy_and_all_else_is_summed():
    torch.manual_seed(0)
    model = Language()
    tokens = torch.zeros(2, 5, dtype=torch.long)
    expected = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert torch.equal(job_of("m", Language, "").loss(model, 2, 5), expected)
    model.wrapped = True
    total = model(tokens)["logits"].sum()
    assert torch.allclose(job_of("m", Language, "").loss(model, 2, 5), total)
    seen = []
    job_of("m", floats, "3x4").loss(lambda x: seen.append(x.shape) or x, 2, 5)
    assert seen == [(2, 3, 4)]


@pytest.mark.parametrize(
    "words, blocks, gathers",
    [
        ("Language --seq 16", "3 modules of class Layer", 3),
        ("Vision --input 3x64x64", "5 modules of class Bottleneck", 5),
        ("floats --input 588", "2 modules of class Linear", 2),
    ],
)
def test_it_trains_and_says_what_its_units_are(words, blocks, gathers, capsys):
    command = ["--model", *f"tests.sim.training.test_plain:{words}".split()]
    assert main([*command, "--json", "--sweep", "limit=1,2"]) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and f"units are the {blocks}" in err
    assert all(run["fits"] and run["flops"] > 0 for run in json.loads(out))


@pytest.mark.parametrize(
    "words, message",
    [
        ("floats", "fails in its forward on 1024 tokens (for other inputs: --input 3x224x224): "),
        ("Vision --input 588", "fails in its forward: RuntimeError: "),
        ("frozen", "its loss has no gradient"),
        ("broken --input 4", "fails in its forward: KeyError: 'mask' ("),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_is_run_for_long(
    words, message, capsys, monkeypatch
):
    monkeypatch.setattr("minifsdp.sim.cli.run._train", lambda *args: pytest.fail("it has run"))
    assert main(["--model", *f"tests.sim.training.test_plain:{words}".split()]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1


def test_a_model_is_tried_with_as_many_tokens_as_it_will_get():
    seen = []
    job = job_of("m", Language, "")
    model = type(job)(job.build, (), lambda m, b, n: seen.append(n) or job.loss(m, b, n), job.note)
    tried(model, "m", "", 7)
    assert seen == [7]


def compiled_whole() -> nn.Module:
    return torch.compile(Language())


def compiled_in_part() -> nn.Module:
    model = Language()
    model.layers[1].compile()
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of what compile() imports
@pytest.mark.parametrize(
    "build, told", [(Language, False), (compiled_whole, True), (compiled_in_part, True)]
)
def test_that_what_is_compiled_is_run_without_it_is_said(build, told):
    note = job_of("mine", build, "").note
    assert ("torch.compile is not modelled, so figures are those without it" in note) is told
    assert "units are the 3 modules of class Layer" in note
