"""tutorials/fsdp_in_one_file.py: short, by itself, and DDP's numbers; and what pages say of it.

More of what it does is in test_steps.py, of which it is the first program.
"""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.ranks import device, on_ranks
from tutorials import build, fsdp_in_one_file, one_file
from tutorials.fsdp_in_one_file import fsdp
from tutorials.train_gpt import GPT, Block

ROOT = Path(__file__).parent.parent
FILE = Path(fsdp_in_one_file.__file__)
FILE_HEAD = FILE.read_text().count("\n", 0, FILE.read_text().index("\ndef fsdp(")) + 1  # lines
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=2e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=2e-3),
}


def source() -> tuple[ast.Module, list[str]]:
    text = FILE.read_text()
    tree = ast.parse(text)
    return tree, [line for line in text.splitlines()[tree.body[0].end_lineno :] if line.strip()]


def test_it_is_as_short_as_is_said_and_needs_nothing_but_torch():
    tree, lines = source()
    assert len(lines) <= 120 and max(map(len, FILE.read_text().splitlines())) <= 100
    for page in (ROOT / "README.md", ROOT / "tutorials" / "06_one_file.md"):
        assert f"{len(lines)} lines" in page.read_text(), page
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.split(".")[0] for name in names} == {"torch", "collections", "functools", "typing"}


def gpt(tied: bool = False, width: int = 64) -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=3, width=width)
    if tied:
        model.head.weight = model.token.weight
    return model.to(device())


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """On other data on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    rows = torch.randint(256, (4, 33), generator=generator).to(device())
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(model: nn.Module, optimizer: str, steps: int = 4) -> list[float]:
    stepper, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_it_trains_bit_for_bit_as_ddp(optimizer, tied):
    model, reference = gpt(tied), gpt(tied)
    engine = fsdp(model, Block)
    assert train(model, optimizer) == train(DDP(reference), optimizer)
    found = engine.full_params()
    expected = dict(reference.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(3)
def test_sizes_that_are_not_divisible_by_the_ranks():
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    model, plain = model.to(device()), plain.to(device())
    engine = fsdp(model, nn.Linear)  # 9 and 4 numbers
    assert [unit.sharded_flat_param.numel() for unit in engine.units] == [3, 2]
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    for each in (model, DDP(plain)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).pow(2).sum().backward()
        optimizer.step()
    found = engine.full_params()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach())  # the sum of three, in any order


@on_ranks(2)
def test_memory_comes_and_goes():
    model = gpt()
    units = fsdp(model, Block).units
    sizes = {path: param.numel() for path, param in model.named_parameters()}
    assert list(sizes) == [
        "sharded_flat_param",
        *(f"blocks.{i}.sharded_flat_param" for i in range(3)),
    ]
    for unit in units:  # a copy, not a view of everything
        shard = unit.sharded_flat_param
        assert shard.untyped_storage().nbytes() == shard.nbytes == unit.flat_param.nbytes // 2
    root, *blocks = units
    seen = []

    def look(*_):
        seen.append([unit.flat_param.untyped_storage().nbytes() for unit in units])

    for block in blocks:
        block.flat_param.register_hook(look)
    loss = loss_of(model, 0)
    look()
    loss.backward()
    look()
    at_loss, *backward, at_end = seen
    one = blocks[0].flat_param.nbytes
    assert at_loss == at_end == [0, 0, 0, 0]
    assert backward == [
        [root.flat_param.nbytes, *(one * (i == at) for i in range(3))] for at in (2, 1, 0)
    ]
    with torch.no_grad():
        loss_of(model, 0)
    look()
    assert seen[-1] == [0, 0, 0, 0]
    assert not hasattr(model.head, "weight")  # nobody can read what is freed


PAGES = [path.stem for path in build.tutorials([])]
LATER = [page for page in PAGES if page > "06_one_file"]


def test_every_later_page_improves_a_line_that_is_there():
    entries = one_file.lines()
    assert {*LATER} <= {*entries}
    lines = FILE.read_text().splitlines()
    for page, entry in entries.items():
        assert entry["text"] in lines[one_file.number(entry["text"]) - 1]
        assert page in PAGES or page[:2] not in {other[:2] for other in PAGES}, page
    shown = (ROOT / "tutorials" / "06_one_file.md").read_text()
    assert one_file.table() in shown
    assert all(f"({page}.md)" in one_file.table() for page in LATER)


def test_a_page_says_which_line(monkeypatch, tmp_path):
    number = one_file.number("def unshard(self)")
    said = one_file.insert("11_limiter")
    assert f"[line {number}](fsdp_in_one_file.py#L{number})" in said and "limit" not in said
    assert build.prose("# before\n# {{ one_file 11_limiter }}\n# after") == f"before\n{said}\nafter"
    moved = tmp_path / FILE.name
    moved.write_text("# one more line\n" + FILE.read_text())
    monkeypatch.setattr(one_file, "FILE", moved)
    assert f"line {number + 1}" in one_file.insert("11_limiter")


@pytest.mark.parametrize("what", ["no such line", "self.gather()"])
def test_a_line_that_is_gone_or_not_the_only_one_is_an_error(what):
    with pytest.raises(KeyError, match="name one of them"):
        one_file.number(what)
    with pytest.raises(KeyError, match="no line that 99_dreams improves"):
        one_file.insert("99_dreams")


def test_what_is_to_be_written_is_named_and_not_shown():
    """A reader who has still to write a function sees its head, and where a line is."""
    inside = [e["text"] for e in one_file.lines().values() if "def " not in e["text"]]
    inside = [text for text in inside if one_file.number(text) > FILE_HEAD]
    assert len(inside) > 10
    shown = one_file.table() + "".join(map(one_file.mention, one_file.lines()))
    assert [text for text in inside if f"`{text}`" in shown] == ["class Engine:"]
    assert "`def unshard(self) -> None:`" in shown and "in `Unit.unshard`" in shown
