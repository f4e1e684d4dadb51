"""fully_sharded.py: what users hold; and the core alone, without anything around it."""

import ast
import io
import subprocess
import sys
import tokenize
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minifsdp.core
from minifsdp.core import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from minifsdp.core.layers import Layer

from .common import Block, batch, mlp, on_ranks, sharded

CORE = Path(minifsdp.core.__file__).parent


@on_ranks(2)
def test_parameters_are_flat_and_are_so_at_any_time():
    model = sharded(mlp())
    names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
    assert names == ["_flat_param", "1._flat_param", "2._flat_param", "3._flat_param"]
    inside = []
    model.engine.units[1].module[1].register_forward_hook(
        lambda *_: inside.append([name for name, _ in model.named_parameters()])
    )
    model(batch()).sum().backward()
    assert len(inside[0]) == 4


@on_ranks(2)
def test_what_is_sharded_cannot_be_computed_with():
    model = sharded(nn.Sequential(Block(nn.Linear(3, 3), nn.LayerNorm(3)), nn.Linear(3, 1)))
    linear, norm = model.engine.units[1].module
    with pytest.raises(TypeError, match="ShardedParameter"):
        linear(batch())
    with pytest.raises(TypeError, match="ShardedParameter"):
        norm(batch())  # None in their place would be a norm without weights
    model(batch()).sum().backward()
    with pytest.raises(TypeError, match="ShardedParameter"):
        linear(batch())


@on_ranks(2)
def test_nor_with_what_stays_for_its_backward_or_is_not_sharded():
    def refused(model):
        root, block = (unit.module for unit in model.engine.units)
        for linear in (root[1], block[0]):
            with pytest.raises(TypeError, match="ShardedParameter"):
                linear(batch())

    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = nn.Sequential(Block(nn.Linear(3, 3)), nn.Linear(3, 3))
        model = sharded(model, sharding_strategy=strategy)
        loss = model(batch()).sum()
        refused(model)
        loss.backward()
        refused(model)


@on_ranks(2)
def test_the_units_of_a_model_and_their_names():
    model = sharded(nn.Sequential(nn.Linear(3, 3), Block(nn.Linear(3, 3), Block(nn.Linear(3, 3)))))
    root, outer, inner = model.engine.units
    assert [unit.name for unit in model.engine.units] == ["", "1", "1.1"]
    assert outer.ancestors == [root] and inner.ancestors == [root, outer] and not root.ancestors
    assert "unit of 12 parameters, sharded over 2 ranks" in repr(model)


@on_ranks(2)
def test_units_of_a_policy_have_the_strategy_of_the_root_and_those_wrapped_by_hand_their_own():
    model = mlp(2)
    model[1] = sharded(model[1], auto_wrap_policy=None)
    model = sharded(model, sharding_strategy=ShardingStrategy.NO_SHARD)
    assert [unit.shard_world_size for unit in model.engine.units] == [1, 2, 1]
    model(batch()).sum().backward()


@on_ranks(1)
def test_what_cannot_be_is_refused_and_the_model_is_as_before():
    model = mlp()
    model[1][0].weight = model[2][0].weight
    with pytest.raises(ValueError, match=r"'0.weight' of 2 is in another unit as well"):
        sharded(model)
    assert len([*model.parameters()]) == 9 and isinstance(model[1], Block)
    with pytest.raises(ValueError, match=r"the core has no .*HYBRID_SHARD; minifsdp has"):
        sharded(mlp(0), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    mixed = mlp()
    mixed[3][0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"same requires_grad.*True: 0.weight; False: 0.bias"):
        sharded(mixed)
    assert all(isinstance(block, Block) for block in mixed[1:4])
    with pytest.raises(ValueError, match="has no forward"):
        FullyShardedDataParallel(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match=r"'_flat_param' of the root is in another unit as well"):
        sharded(sharded(mlp(0))._fsdp_wrapped_module)


@on_ranks(1)
def test_a_parameter_that_a_unit_inside_has_taken_is_refused():
    model = mlp()
    model[2][0].weight = model[1][0].weight
    model[1] = sharded(model[1], auto_wrap_policy=None)
    with pytest.raises(ValueError, match=r"'2.0.weight' of the root is in another unit as well"):
        sharded(model, auto_wrap_policy=None)


@on_ranks(1)
def test_a_model_cannot_be_moved_after_wrapping():
    with pytest.raises(RuntimeError, match="move or cast a model before you wrap it"):
        sharded(mlp()).double()
    sharded(mlp()).train().eval()


@on_ranks(1)
def test_the_wrapper_has_the_attributes_of_what_it_wraps():
    model = mlp()
    model.scale = 3
    wrapped = sharded(model)
    assert wrapped.scale == 3
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'color'"):
        wrapped.color  # noqa: B018


@on_ranks(2)
def test_a_former_root_leaves_nothing_behind():
    model = mlp()
    model[1] = sharded(model[1], auto_wrap_policy=None)
    model[1](torch.ones(1, 5))  # a forward whose backward never comes
    inner = model[1]._unit
    assert inner.reasons
    sharded(model, auto_wrap_policy=None)
    assert not inner.reasons and inner.unsharded.storage.size() == 0


class Listens(Layer):
    """Hears of all moments, and changes nothing."""

    def __init__(self, heard):
        self.heard = heard


def listening(moment):
    def method(self, *args):
        words = [moment]
        for arg in args[:1]:
            unit = getattr(arg, "unit", arg)
            words.append(getattr(unit, "label", getattr(arg, "name", arg)))
        self.heard.append(" ".join(word for word in words if isinstance(word, str)))
        if moment == "around_forward":
            return nullcontext()
        if moment in ("after_forward", "gradient"):
            return args[-1]
        return args[1:]  # of "inputs"; no other moment returns anything

    return method


MOMENTS = [moment for moment in vars(Layer) if not moment.startswith("_")]
for moment in MOMENTS:
    setattr(Listens, moment, listening(moment))


class Pair(Block):
    """Has two outputs."""

    fails = False

    def forward(self, x):
        if self.fails:
            raise RuntimeError("it fails")
        return self[0](x), self[1](x)


IN_A_FORWARD = """
enter <root>, reset, start TRAIN,
before_forward <root>, gathered <root>, inputs <root>, around_forward <root>,
before_forward '1', gathered '1', inputs '1', around_forward '1', after_forward '1', freed '1',
after_forward <root>, end_of_forward <root>, idle
"""
IN_A_BACKWARD = """
enter_backward, start_backward '1', before_backward <root>, before_backward '1',
gradient '1', freed '1', gradient <root>, freed <root>,
end_of_backward, complete, idle
"""
IN_A_FORWARD_THAT_FAILS = """
enter <root>, reset, start TRAIN,
before_forward <root>, gathered <root>, inputs <root>, around_forward <root>,
before_forward '1', gathered '1', inputs '1', around_forward '1', error '1', freed '1',
error <root>, failed, reset, freed <root>, idle
"""


def words(text):
    return " ".join(text.split()).split(", ")


@on_ranks(2)
def test_layers_are_called_at_their_moments():
    root = nn.Sequential(nn.Linear(3, 3), Pair(nn.Linear(3, 3), nn.Linear(3, 3)))
    model, heard = sharded(root, auto_wrap_policy=ModuleWrapPolicy({Pair})), []
    model.use(lambda hooks: [Listens(heard)])
    one, other = model(batch())
    assert heard == words(IN_A_FORWARD), heard
    del heard[:]
    (one + other).sum().backward()
    again = [word for word in heard if word.startswith("again")]
    assert set(again) == {"again <root>", "again '1'"}
    assert [word for word in heard if word not in again] == words(IN_A_BACKWARD), heard
    model.engine.units[1].module.fails = True
    del heard[:]
    with pytest.raises(RuntimeError, match="it fails"):
        model(batch())
    assert heard == words(IN_A_FORWARD_THAT_FAILS), heard
    missing = {*MOMENTS} - {word.split()[0] for word in [*heard, *words(IN_A_BACKWARD), *again]}
    assert missing == {"after_forward", "end_of_forward", "broken"}  # who calls that: layers.py
    assert "idle             Listens" in repr(model.engine.moments)


@on_ranks(2)
def test_a_group_of_some_ranks_may_share_a_model():
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = sharded(mlp(), process_group=own)
    assert {unit.shard_world_size for unit in model.engine.units} == {1}
    model(batch()).sum().backward()


# ------------------------------------------------------------------------------------- it is alone


def code_lines(path: Path) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    source = path.read_text()
    text = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (*layout, tokenize.COMMENT)
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - text)


def test_it_fits_in_an_afternoon():
    assert sum(map(code_lines, CORE.glob("*.py"))) <= 1230


def test_it_imports_torch_and_itself():
    for path in CORE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            else:
                continue
            for name in names:
                root = name.split(".")[0]
                assert root == "torch" or root in sys.stdlib_module_names, (path.name, name)


ALONE = """
import sys
import torch, torch.distributed as dist
from torch import nn
from my_fsdp import FullyShardedDataParallel, ModuleWrapPolicy

dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
plain = nn.parallel.DistributedDataParallel(plain)
model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
for one in (plain, model):
    optimizer, losses = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = one(torch.rand(2, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if one is plain:
        expected = losses
assert losses == expected, (losses, expected)
assert not [name for name in sys.modules if name.startswith("minifsdp")]
dist.barrier()  # else one rank may end while the other still talks to it
del one, plain  # DDP must not be the last that holds the group: see tutorials/train_gpt.py
dist.destroy_process_group()
"""


def test_copied_out_under_another_name_it_trains(tmp_path):
    folder = tmp_path / "my_fsdp"
    folder.mkdir()
    for path in CORE.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    (tmp_path / "train.py").write_text(ALONE)
    store = f"file://{tmp_path}/rendezvous"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "train.py", store, str(rank)],
            cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
