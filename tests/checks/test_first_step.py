"""first_step.py: a model on the meta device in fully_shard, in the ways that programs for torch's
give it memory and values; and what has none is refused by name."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import fully_shard
from minifsdp.support import shard_changes
from tests.live_bytes import bytes_at
from tests.ranks import device, on_ranks


class Block(nn.Module):
    """It has no reset_parameters(), and a table in no state dict. Its rows do not divide by two."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 7), nn.Parameter(torch.empty(7))
        self.frozen = nn.Linear(7, 6).requires_grad_(False)
        self.register_buffer("table", torch.empty(6), persistent=False)

    def forward(self, x):
        return x + self.frozen(torch.tanh(self.linear(x)) * self.scale) + self.table

    def init_table(self):
        with torch.no_grad():
            self.table.copy_(torch.arange(6.0))


class Model(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.embed.weight

    def init_weights(self):
        for number, param in enumerate(self.parameters(), 1):
            nn.init.constant_(param, number / 10)
        for block in self.blocks:
            block.init_table()

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def on_meta(make=Model):
    with torch.device("meta"):
        return make()


def filled() -> Model:
    """One that is there as a whole, the same on each rank."""
    model = Model()
    model.init_weights()
    return model.to(device())


def shard(model: Model, fully_shard=fully_shard, **settings) -> Model:
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randint(5, (4,)).to(device())).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------- memory and values, in each way


def initialize(model: Model, where: torch.device) -> None:
    """torchtitan's."""
    model.to_empty(device=where)
    model.init_weights()


def divided(model: Model, state: dict[str, Tensor], where: torch.device) -> dict[str, Tensor]:
    """As torch's tutorial does it."""
    of_model, found = model.state_dict(), {}
    for name, value in state.items():
        param = of_model[name]
        whole = value.to(device())
        found[name] = distribute_tensor(whole, param.device_mesh, param.placements).to(where)
    return found


def assign(model: Model, where: torch.device) -> None:
    model.load_state_dict(divided(model, filled().state_dict(), where), assign=True)
    model.tie_weights()  # as accelerate does after it
    init_tables(model, where)


def assign_whole(model: Model, where: torch.device) -> None:
    state = {name: value.to(where) for name, value in filled().state_dict().items()}
    model.load_state_dict(state, assign=True)
    init_tables(model, where)


def load_whole(model: Model, where: torch.device) -> None:
    model.to_empty(device=where)
    model.load_state_dict(filled().state_dict())
    init_tables(model, where)


def broadcast(model: Model, where: torch.device) -> None:
    """torch's way for a checkpoint that only rank 0 has read, into a model on meta."""
    state = filled().state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=where.type == "cpu"
    )
    set_model_state_dict(model, state, options=options)
    init_tables(model, where)


def broadcast_into_memory(model: Model, where: torch.device) -> None:
    model.to_empty(device=where)
    broadcast(model, where)


def in_parts(model: Model, where: torch.device) -> None:
    """Some parameters of a unit by one way, the others by another one: torchtune's with LoRA."""
    for number, block in enumerate(model.blocks):
        block.linear.to_empty(device=where)
        nn.init.constant_(block.linear.weight, 0.1 * (3 + 5 * number))
    state = {n: v for n, v in filled().state_dict().items() if not n.endswith("linear.weight")}
    model.load_state_dict(divided(model, state, where), assign=True, strict=False)
    init_tables(model, where)


def init_tables(model: Model, where: torch.device) -> None:
    for block in model.blocks:
        block.table = torch.empty(6, device=device())
        block.init_table()


WAYS = [initialize, assign, assign_whole, load_whole, broadcast, broadcast_into_memory, in_parts]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("early", [False, True], ids=["optimizer after", "optimizer before"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_model_from_meta_trains_like_torchs_that_was_there(way, early, offload):
    settings = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    expected, model = filled(), shard(on_meta(), **settings)
    shard(expected, torchs_fully_shard)
    assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
    optimizer = adamw(model) if early else None  # torch's is right after to_empty() only
    names = list(dict(model.named_parameters()))
    way(model, torch.device("cpu") if offload else device())
    assert list(dict(model.named_parameters())) == names
    assert model.head.weight is model.embed.weight
    assert train(model, optimizer or adamw(model)) == train(expected, adamw(expected))


GRIDS = {"replicate": (2, 1), "shard": (1, 2)}


@pytest.mark.parametrize("grid", GRIDS)
@on_ranks(2)
def test_hybrid_sharding_from_meta(grid):
    mesh = init_device_mesh(device().type, GRIDS[grid], mesh_dim_names=("replicate", "shard"))
    expected, model = shard(filled()), shard(on_meta(), mesh=mesh)
    assign(model, device())
    assert train(model, adamw(model)) == train(expected, adamw(expected))


@on_ranks(2)
def test_units_of_several_modules_and_units_around_those_that_have_memory_already():
    model, expected = on_meta(), filled()
    for block in model.blocks:
        fully_shard(block)
    model.blocks[0].to_empty(device=device())
    model.blocks[1].load_state_dict(filled().blocks[1].state_dict(), assign=True)
    fully_shard([model.embed, model.head])
    fully_shard(model)
    initialize(model, device())
    shard(expected)
    assert train(model, adamw(model)) == train(expected, adamw(expected))


@on_ranks(2)
def test_an_lstm_computes_with_its_new_weights():
    model, plain = fully_shard(on_meta(lambda: nn.LSTM(6, 5))), nn.LSTM(6, 5).to(device())
    model.to_empty(device=device())
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        nn.init.constant_(mine, 0.3)
        nn.init.constant_(its, 0.3)
    x = torch.ones(3, 6, device=device())
    assert torch.equal(model(x)[0], plain(x)[0])


@on_ranks(2)
def test_what_is_assigned_gives_the_dtype():
    model, expected = shard(on_meta()), shard(filled().bfloat16())
    model.load_state_dict(divided(model, filled().bfloat16().state_dict(), device()), assign=True)
    for block in model.blocks:
        block.table = torch.arange(6.0, device=device()).bfloat16()
    assert all(param.dtype is torch.bfloat16 for param in model.parameters())
    assert train(model, adamw(model)) == train(expected, adamw(expected))


@on_ranks(2)
def test_its_own_state_goes_back_in_the_middle_of_a_training():
    """A copy that was made before, and what is there now; the optimizer stays the same."""
    model, expected = shard(filled()), shard(filled())
    optimizer, its = adamw(model), adamw(expected)
    params, state = list(model.parameters()), {n: v.clone() for n, v in model.state_dict().items()}
    train(model, optimizer)
    model.load_state_dict(state, assign=True)
    model.load_state_dict(model.state_dict(), assign=True)
    train(expected, its)
    expected.load_state_dict({name: value.full_tensor() for name, value in state.items()})
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert train(model, optimizer) == train(expected, its)


# -------------------------------------------------------------------------------- a rank's memory

WIDTH, LAYERS = 64, 6


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def all_at_once(model: nn.Module, state: dict[str, Tensor]) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def each_by_itself(model: nn.Module, state: dict[str, Tensor]) -> None:
    """As accelerate does it with ``cpu_ram_efficient_loading``."""
    found = {}
    for name, param in model.state_dict().items():
        whole = torch.empty(param.shape, device=device())
        if dist.get_rank() == 0:
            whole.copy_(state[name])
        dist.broadcast(whole, 0)
        found[name] = distribute_tensor(whole, param.device_mesh, param.placements)
        del whole
    model.load_state_dict(found, assign=True)


@pytest.mark.parametrize("load", [all_at_once, each_by_itself])
@on_ranks(2)
def test_a_rank_without_the_checkpoint_holds_one_unit_beyond_its_shards(load):
    unit = 4 * WIDTH**2
    shards, margin = LAYERS * unit // 2, unit // 4
    state = layers().to(device()).state_dict() if dist.get_rank() == 0 else {}
    with (
        bytes_at(dist, "broadcast") as sent,
        bytes_at(dist, "_broadcast_coalesced") as sent_by_other_releases,
        bytes_at(shard_changes, "follow_changes") as followed,
    ):
        model = on_meta(layers)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        load(model, state)
        del state
        with torch.no_grad():
            model(torch.zeros(1, WIDTH, device=device()))
    if dist.get_rank() == 0:
        return
    sent += sent_by_other_releases
    # The tensor that has come, whole, and what is left here of those before it.
    assert len(sent) >= LAYERS
    assert all(unit <= found <= shards + unit + margin for found in sent), sent
    # A shard is copied to where it stays, and its memory before that is let go.
    assert len(followed) == LAYERS + 1
    assert all(shards <= found <= shards + unit + margin for found in followed), followed


# ---------------------------------------------------------------------------------- refused by name


@on_ranks(2)
def test_what_has_no_memory_is_refused_by_name_until_it_has_some():
    model, x = shard(on_meta()), torch.zeros(1, dtype=torch.long, device=device())
    match = r"^embed.weight, head.weight, blocks.0.scale, blocks.0.table, .*, \.\.\.: on the meta"
    for use in (lambda: model(x), model.unshard):
        with pytest.raises(RuntimeError, match=match + r".*to_empty\(.*assign=True"):
            use()
    model.blocks.to_empty(device=device())
    with pytest.raises(RuntimeError, match=r"^embed\.weight, head\.weight: on the meta"):
        model(x)
    model.embed.to_empty(device=device())
    model.init_weights()
    model.blocks[1].table = model.blocks[1].table.to("meta")
    with pytest.raises(RuntimeError, match=r"^blocks.1.table: on .*such as a table of positions"):
        model(x)
    model.init_weights()
    model.blocks[1].table = torch.empty(6, device=device())
    model.init_weights()
    expected = shard(filled())
    assert train(model, adamw(model)) == train(expected, adamw(expected))


@on_ranks(1)
def test_what_is_ignored_may_be_anywhere():
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model.forward = lambda x: model[0](x)
    fully_shard(model, ignored_params=set(model[1].parameters()))
    model[0].to_empty(device=device())
    model(torch.ones(1, 2, device=device()))


@on_ranks(1)
def test_the_wrapper_gives_memory_when_it_wraps_as_torchs_does():
    with pytest.raises(ValueError, match=r"is on the meta device .* no reset_parameters\(\)"):
        FSDP(on_meta(), use_orig_params=True)


@on_ranks(1)
def test_a_warning_says_that_values_were_not_loaded():
    """torch's own: what is loaded into meta is lost without ``assign``."""
    model = shard(on_meta())
    with pytest.warns(UserWarning, match="embed.weight: copying from a non-meta parameter"):
        model.load_state_dict(filled().state_dict())


@pytest.mark.parametrize("problem", ["meta", "strange parameter"])
@on_ranks(2)
def test_what_is_wrong_on_one_rank_is_refused_on_every_rank(problem):
    """Or the other one would wait for it in vain."""
    model, other = shard(filled()), dist.get_rank() == 1
    if problem == "meta" and other:
        model = shard(on_meta())
        model.embed.to_empty(device=device())
    elif other:
        dict.__setitem__(model._modules, "strange", nn.Linear(1, 1))
    name = "blocks.0.scale, .*: on the meta device" if problem == "meta" else "'strange'"
    x = torch.zeros(1, dtype=torch.long, device=device())
    for use in (model.unshard, lambda: model(x)):
        begins = "^" if other else "^rank 1: "
        with pytest.raises(RuntimeError if other else ValueError, match=begins + name):
            use()
    model._modules.pop("strange", None)
    if problem == "meta" and other:
        model.blocks.to_empty(device=device())
        model.init_weights()
    expected = shard(filled())
    assert train(model, adamw(model)) == train(expected, adamw(expected))


@on_ranks(2)
def test_a_tensor_that_is_written_to_a_modules_parameters_is_refused_by_name():
    """An optimizer may have either, and only one can be trained."""
    model, x = shard(on_meta()), torch.zeros(1, dtype=torch.long, device=device())
    linear, values = model.blocks[0].linear, torch.ones(7, device=device())
    own = linear.bias
    given = nn.Parameter(distribute_tensor(values, own.device_mesh, own.placements))
    linear._parameters["bias"] = given
    match = r"in the place of parameter 'linear.bias' of unit 'blocks.0' .* use load_state_dict\(\)"
    with pytest.raises(RuntimeError, match=match):
        model(x)
    linear._parameters["bias"] = own
    initialize(model, device())
    linear.bias = given  # this is heard of
    assert linear.bias is own and torch.equal(linear.bias.full_tensor(), values)
    model(x)
