"""divided_param.py: DTensors and the flat parameter behind them are the same numbers, whoever
changes them, and training with them is training with DistributedDataParallel."""

import copy
import gc
import io
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, get_total_norm

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ShardingStrategy, fully_shard
from minifsdp.comm import pieces
from minifsdp.support.divided_param import is_optimized, unit_of_param
from tests.live_bytes import settled_bytes
from tests.ranks import device, on_ranks, run
from tests.small import batch, layers, stack, travels

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # DDP reduces what is there once more, with what is new
WIDTH = 5  # not divisible by 2 or 3
STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def rows(blocks=1, width=WIDTH, **settings) -> FSDP:
    return stack(blocks, width, use_orig_params=True, **settings)


def ddp(blocks=1, width=WIDTH) -> DDP:
    return DDP(layers(blocks, width))


def backward(model, at=0, width=WIDTH):
    model(batch(width, at)).pow(2).sum().backward()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model, plain, **tolerance):
    """Parameters and gradients: bit for bit, if no tolerance is given."""
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    for param, expected in pairs:
        torch.testing.assert_close(whole(param.detach()), expected.detach(), **tolerance)
        assert (param.grad is None) == (expected.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(whole(param.grad), expected.grad, **tolerance)


# ------------------------------------------------------------------------------ what is seen


def check_local_shapes(width):
    model, plain = rows(width=width), layers(1, width)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torchs = distribute_tensor(expected.detach(), param.device_mesh, [Shard(0)])
        assert isinstance(param, nn.Parameter) and param.placements == torchs.placements
        assert param.shape == torchs.shape and param.stride() == torchs.stride()
        assert torch.equal(param.to_local(), torchs.to_local())
        assert torch.equal(whole(param), expected)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_optimizer_sees_what_torch_would_distribute_under_the_models_own_names(
    world_size, width
):
    run(check_local_shapes, world_size, width)


@pytest.mark.parametrize("moved", [False, True])
@on_ranks(2)
def test_whose_they_are(moved):
    model = rows().double() if moved else rows()
    unit = model._unit
    for param in (*unit.optimized_params, unit.sharded_flat_param):
        assert unit_of_param(param) is unit and is_optimized(param)
    assert unit_of_param(nn.Parameter(torch.ones(1))) is None and not is_optimized(torch.ones(1))


@on_ranks(2)
def test_what_has_no_dimension_is_refused_by_name():
    model = nn.Linear(2, 2).to(device())
    model.scale = nn.Parameter(torch.ones((), device=device()))
    with pytest.raises(ValueError, match="'scale' has no dimension"):
        FSDP(model, use_orig_params=True)
    assert isinstance(model.weight, nn.Parameter) and not isinstance(model.weight, DTensor)


# --------------------------------------------------------------------------------- gradients


def parts(model):
    unit = model._unit
    return unit.sharded_flat_param, unit.optimized_params


@on_ranks(2)
def test_a_gradient_that_is_stored_is_shown_in_each_and_is_the_same_memory():
    model = rows()
    flat, params = parts(model)
    assert flat.grad is None
    flat.grad = torch.arange(float(len(flat)), device=device())
    for param in params:
        assert param.grad.shape == param.shape and param.grad.placements == param.placements
        param.grad.mul_(2)
    weight, bias = (param.to_local().numel() for param in params)
    found = flat.grad[:weight], flat.grad[15 : 15 + bias]
    assert torch.equal(
        torch.cat(found).cpu(), 2.0 * torch.cat([torch.arange(weight), 15 + torch.arange(bias)])
    )
    del flat.grad
    assert flat.grad is None and all(param.grad is None for param in params)


@on_ranks(2)
def test_a_part_that_is_cleared_is_zero_and_all_of_them_are_none():
    model = rows()
    flat, (weight, bias) = parts(model)
    own = slice(weight.to_local().numel())
    flat.grad = torch.ones(len(flat), device=device())
    weight.grad = None
    assert not flat.grad[own].any() and flat.grad[15:].all()
    bias.grad = None
    assert flat.grad is None
    flat.grad = torch.ones(len(flat), device=device())
    torch.optim.SGD([weight], lr=0.1).zero_grad(set_to_none=False)
    assert not flat.grad[own].any() and flat.grad[15:].all()


@on_ranks(2)
def test_a_gradient_that_is_assigned_is_read():
    model = rows()
    flat, (weight, bias) = parts(model)
    weight.grad = torch.ones_like(weight)
    own = weight.to_local().numel()
    assert flat.grad[:own].eq(1).all() and not flat.grad[15:].any()
    bias.grad = torch.full_like(bias, 3)
    assert flat.grad[15] == 3 and flat.grad[0] == 1
    flat.grad.mul_(2)  # by clip_grad_norm_(), say
    assert weight.grad.to_local().eq(2).all() and bias.grad.to_local().eq(6).all()


def assign(param, gradient):
    param.grad = gradient


CLEAR = {
    "all to None": lambda model, first: model.zero_grad(),
    "all to zero": lambda model, first: model.zero_grad(set_to_none=False),
    "a part": lambda model, first: assign(first, None),
    "scaled": lambda model, first: [param.grad.mul_(0.5) for param in model.parameters()],
    "assigned": lambda model, first: assign(first, first.grad * 3),
}


@pytest.mark.parametrize("how", CLEAR)
@on_ranks(2)
def test_what_is_done_to_gradients_between_two_backwards_is_as_with_ddp(how):
    models = rows(), ddp()
    for model in models:
        backward(model)
        CLEAR[how](model, next(model.parameters()))
        backward(model, at=1)
    assert_same(*models, **CLOSE)


@on_ranks(2)
def test_a_gradient_that_a_program_has_assigned_is_the_one_that_backwards_add_to():
    models = rows(), ddp()
    for model in models:
        own = [torch.zeros_like(param) for param in model.parameters()]
        for param, gradient in zip(model.parameters(), own, strict=True):
            param.grad = gradient
        for at in range(3):
            torch._foreach_zero_(own)
            backward(model, at)
            assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))
    assert_same(*models)


@on_ranks(2)
def test_a_gradient_that_a_program_has_kept_stays_when_others_of_its_unit_are_not_cleared():
    models, kept = (rows(), ddp()), []
    for model in models:
        first = next(model.parameters())
        backward(model)
        kept.append(first.grad)
        assign(first, None)
        backward(model, at=1)
    torch.testing.assert_close(whole(kept[0]), kept[1], rtol=0, atol=0)


# ------------------------------------------------------------------------- copies and files

SAVED = {
    "the parameters": lambda model: list(model.parameters()),
    "detached": lambda model: [param.detach() for param in model.parameters()],
    "their data": lambda model: [param.data for param in model.parameters()],
    "a state dict": lambda model: list(model.state_dict().values()),
    "one of parameters": lambda model: list(model.state_dict(keep_vars=True).values()),
}


@pytest.mark.parametrize("what", SAVED)
@on_ranks(2)
def test_parameters_are_copied_and_saved_as_torchs_are(what):
    """Not with the rest of their unit's shard, and not with the unit."""
    model = fully_shard(layers(2, 200).to(device()))
    given = SAVED[what](model)
    for value, other in zip(given, copy.deepcopy(given), strict=True):
        file = io.BytesIO()
        torch.save(value, file)
        assert file.tell() < value.to_local().nbytes + 4000
        file.seek(0)
        for same in (other, torch.load(file, weights_only=True)):
            assert type(same) is type(value) and same.requires_grad == value.requires_grad
            assert torch.equal(same.to_local(), value.to_local())
            assert same.to_local().data_ptr() != value.to_local().data_ptr()
            assert unit_of_param(same) is None and not is_optimized(same)


@on_ranks(2)
def test_what_is_shared_with_another_process_goes_on():
    model, plain = rows(), ddp()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for at in range(3):
        for either, optimizer in zip((model, plain), optimizers, strict=True):
            backward(either, at)
            optimizer.step()
            optimizer.zero_grad()
        if at == 0 and device().type == "cpu":  # as a queue of torch.multiprocessing does it
            list(model.parameters())[1].to_local().share_memory_()
    assert_same(model, plain)


# ----------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@on_ranks(2)
def test_every_change_is_counted(dtype):
    model = rows().to(dtype)  # with float64, what is counted was made anew in the first forward
    model(batch(WIDTH).to(dtype)).sum().backward()
    flat, (weight, bias) = parts(model)

    @torch.no_grad()
    def in_place(tensor):
        tensor.mul_(2)

    steps = [
        torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach).step
        for foreach in (False, True)
    ]
    tensors = (weight, bias, flat, weight.to_local(), bias.detach())
    changes = [lambda tensor=tensor: in_place(tensor) for tensor in tensors]
    for change in changes + steps:
        before = flat._version
        change()
        assert flat._version > before


@pytest.mark.parametrize("foreach", [False, True])
@every_strategy
@on_ranks(2)
def test_a_step_between_a_forward_and_its_backward_is_refused(strategy, foreach):
    model = rows(sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    backward(model)
    loss = model(batch(WIDTH)).pow(2).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"changed|modified"):
        loss.backward()


# ---------------------------------------------------------------------------- freeze, move, cast


@on_ranks(2)
def test_a_parameter_may_be_frozen_and_thawed_between_steps():
    def between(model, at):
        for number, param in enumerate(model.parameters()):
            param.requires_grad_(not (at in (1, 3) and number == 0))

    models = [rows(), layers(1, WIDTH)]
    for at in range(5):
        for model in models:
            between(model, at)
            for param in model.parameters():
                param.grad = None
        plain = DDP(models[1])  # it has to be told anew who is trained
        for model in (models[0], plain):
            backward(model, at)
            for param in model.parameters():
                if param.grad is not None:
                    with torch.no_grad():
                        param.sub_(0.1 * param.grad)
        assert_same(models[0], plain)
        del plain


@pytest.mark.parametrize("which", [0, 1])
@on_ranks(2)
def test_gradients_from_before_stay_when_one_is_frozen_or_thawed(which):
    models = rows(), layers(1, WIDTH)
    for at, frozen in enumerate((False, True, True, False)):
        for model in models:
            list(model.parameters())[which].requires_grad_(not frozen)
        plain = DDP(models[1])  # it has to be told anew who is trained
        for model in (models[0], plain):
            backward(model, at)
        assert_same(models[0], plain, **CLOSE)


@on_ranks(2)
def test_what_is_frozen_while_gradients_of_no_sync_wait_is_refused():
    model, plain = rows(), ddp()
    for each in (model, plain):
        with each.no_sync():
            backward(each)
    first = next(model.parameters())
    first.requires_grad_(False)
    with pytest.raises(RuntimeError, match="was frozen or thawed while gradients from no_sync"):
        backward(model)
    first.requires_grad_(True)
    for each in (model, plain):
        backward(each, at=1)
    assert_same(model, plain, **CLOSE)


@on_ranks(2)
def test_all_may_be_frozen():
    model = rows()
    for param in model.parameters():
        param.requires_grad_(False)
    assert not model(batch(WIDTH)).requires_grad
    for param in model.parameters():
        param.requires_grad_(True)
    plain = ddp()
    for each in (model, plain):
        backward(each)
    assert_same(model, plain)


@on_ranks(2)
def test_memory_of_another_shape_is_refused_by_name_and_the_model_can_be_mended():
    model = rows()
    param = dict(model.named_parameters())["0.weight"]
    own = param._local_tensor
    param._local_tensor = own[:1].clone()  # as a library does that prunes
    with pytest.raises(ValueError, match=r"'0.weight' of unit <root> was given data of which"):
        backward(model)
    param._local_tensor = own
    backward(model)


@on_ranks(2)
def test_a_model_may_be_cast():
    models = rows().double(), DDP(layers(1, WIDTH).double())
    for model in models:
        model(batch(WIDTH).double()).sum().backward()
    assert next(models[0].parameters()).dtype is torch.float64
    assert_same(*models)


# -------------------------------------------------------------------------------- as with DDP


@on_ranks(2)
def test_norms_are_ddps():
    models = rows(3), ddp(3)
    for model in models:
        backward(model)
    total, expected = (whole(get_total_norm([p.grad for p in m.parameters()])) for m in models)
    torch.testing.assert_close(total, expected)
    total, expected = (whole(clip_grad_norm_(m.parameters(), 0.01)) for m in models)
    torch.testing.assert_close(total, expected)
    for param, plain in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(whole(param.grad), plain.grad)


@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(2)
def test_groups_by_name_are_ddps_bit_for_bit(foreach):
    models = rows(2), ddp(2)
    for model in models:
        named = list(model.named_parameters())
        groups = [
            {"params": [param for name, param in named if name.endswith("weight")]},
            {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5, foreach=foreach)
        for at in range(3):
            backward(model, at)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*models)


@pytest.mark.parametrize("set_to_none", [True, False])
@every_strategy
@on_ranks(2)
def test_what_no_sync_has_left_is_reduced_later_or_cleared(strategy, set_to_none):
    models = rows(sharding_strategy=strategy), ddp()
    for model in models:
        for at, clears in enumerate((False, True, False)):
            with model.no_sync():
                backward(model, at)
            if clears:
                model.zero_grad(set_to_none)
            backward(model, at + 3)
    assert_same(*models, **CLOSE)


@on_ranks(2)
def test_a_step_with_what_no_sync_has_left_is_refused():
    model = rows()
    with model.no_sync():
        backward(model)
    for foreach in (False, True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        with pytest.raises(RuntimeError, match="an optimizer is about to step"):
            optimizer.step()
    next(model.parameters()).grad = None
    with pytest.raises(RuntimeError, match="its gradient was changed"):
        backward(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_a_part_that_an_optimizer_clears_in_no_sync_is_no_way_to_lose_the_rest(set_to_none):
    model = rows()
    optimizer = torch.optim.SGD(list(model.parameters())[:1], lr=0.1, foreach=True)
    with model.no_sync():
        backward(model)
    optimizer.zero_grad(set_to_none)
    with pytest.raises(RuntimeError, match=r"cleared in part\?"):
        backward(model)


@pytest.mark.parametrize("when", ["before the forward", "before the backward", "before a look"])
@on_ranks(2)
def test_what_an_optimizer_clears_with_one_kernel_is_left_out(when):
    """torch's foreach kernels count no version of DTensors."""
    models = rows(), ddp()
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        with model.no_sync():
            backward(model, 0)
        if when == "before the forward":
            optimizer.zero_grad(set_to_none=False)
        loss = model(batch(WIDTH, 1)).pow(2).sum()
        if when != "before the forward":
            optimizer.zero_grad(set_to_none=False)
        if when == "before a look" and isinstance(model, FSDP):
            assert model.clip_grad_norm_(1.0) == 0
        loss.backward()
        optimizer.step()
    assert_same(*models)


# ------------------------------------------------------------------------- what is saved and sent


@on_ranks(2)
def test_a_model_in_rows_is_saved_as_one_in_chunks_and_loads_what_that_has_saved():
    divided, chunks = rows(), stack(1, WIDTH)
    saved, expected = divided.state_dict(), chunks.state_dict()
    assert list(saved) == list(expected)
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    for model in (divided, chunks):
        other = stack(1, WIDTH, use_orig_params=model is chunks)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        other.load_state_dict(model.state_dict())
        assert not any(tensor.any() for tensor in other.state_dict().values())


def exchange(param):
    average = param.detach() * 2
    param.data, average = average, param.data


ASSIGNED = {
    "a DTensor": lambda p: setattr(p, "data", p.detach() * 2),
    "a whole tensor": lambda p: setattr(p, "data", p.detach().full_tensor() * 2),
    "a local tensor": lambda p: setattr(p, "data", p.detach().to_local() * 2),
    "two exchanged": exchange,
}
WRITTEN = {
    "data.copy_": lambda p: p.data.copy_(p.detach() * 2),
    "data.mul_": lambda p: p.data.mul_(2),
    "detach().copy_": lambda p: p.detach().copy_(p.detach() * 2),
    "an initialization": lambda p: nn.init.constant_(p.data, 0.25),
    "the local tensor": lambda p: p.to_local().mul_(2) if isinstance(p, DTensor) else p.mul_(2),
}


@pytest.mark.parametrize("what", ASSIGNED)
@on_ranks(2)
def test_what_is_assigned_to_data_is_refused_by_name(what):
    """torch ignores it, and the model would go on with the values from before."""
    model, expected = rows(), rows()
    for _ in range(2):
        backward(model)
        backward(expected)
        for param in list(model.parameters())[:2]:
            ASSIGNED[what](param)
        with pytest.raises(
            RuntimeError, match=r"data of '0.weight', '0.bias' of unit <root>.*copy_"
        ):
            model(batch(WIDTH))
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert param.shape == other.shape and torch.equal(whole(param), whole(other))
    backward(model)
    model.double()
    model(batch(WIDTH).double())


@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(2)
def test_what_is_assigned_to_the_data_of_a_gradient_is_refused_before_a_step(foreach):
    model = rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    for _ in range(2):
        backward(model)
        before = {name: whole(param) for name, param in model.named_parameters()}
        grad = model.get_parameter("0.bias").grad
        grad.data = torch.zeros_like(grad)
        with pytest.raises(RuntimeError, match=r"gradient of '0.bias' of unit <root>\. .*copy_"):
            optimizer.step()
        for name, param in model.named_parameters():
            assert torch.equal(whole(param), before[name])
        for param in model.parameters():
            param.grad = torch.ones_like(param)  # which is right
        optimizer.step()
        for name, param in model.named_parameters():
            assert torch.equal(whole(param), before[name] - 0.1)
        optimizer.zero_grad()


@pytest.mark.parametrize("how", WRITTEN)
@on_ranks(2)
def test_what_is_written_in_place_counts_as_in_a_plain_model(how):
    model, plain = rows(), ddp()
    for each in (model, plain):
        for _ in range(2):
            each.zero_grad()
            backward(each)
            with torch.no_grad():
                for param in each.parameters():
                    WRITTEN[how](param)
    backward(model)
    backward(plain)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(param.detach()), expected.detach())


@contextmanager
def reduced():
    """The sizes of the gradients that units reduce in here."""
    found = []

    def noting(reduce_scatter):
        def noted(comm, unit, flat, scale):
            found.append(pieces.whole(flat).numel())
            return reduce_scatter(comm, unit, flat, scale)

        return noted

    with travels("reduce_scatter", noting):
        yield found


@on_ranks(2)
def test_of_a_unit_that_is_frozen_in_part_only_the_rest_has_gradients_and_is_sent():
    def low_rank():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2), nn.Linear(2, 64)).to(device())
        return model[0].requires_grad_(False) and model

    model, plain = FSDP(low_rank(), use_orig_params=True), DDP(low_rank())
    unit, numel = model._unit, sum(p.numel() for p in plain.parameters() if p.requires_grad)
    marks = 2 * unit.layout.marks
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for at in range(3):
            optimizer.zero_grad()
            with reduced() as sent:
                backward(each, at, 64)
            assert sent == ([numel + marks] if each is model else [])
            optimizer.step()
    assert_same(model, plain)
    assert len(unit.sharded_flat_param.grad) == numel // 2
    assert unit.unsharded.flat_param.numel() == numel + marks < len(unit.unsharded.data)
    grads = {param.grad.to_local().untyped_storage()._cdata: param.grad.to_local().untyped_storage()
             for param in model.parameters() if param.grad is not None}  # fmt: skip
    assert [s.nbytes() for s in grads.values()] == [4 * (numel + marks) // 2]


@on_ranks(2)
def test_gradients_of_low_precision_may_be_kept():
    low = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = rows(mixed_precision=low).to(device())  # which makes other DTensors of them
    backward(model)
    backward(model)
    for param in model.parameters():
        assert param.dtype is torch.float32 and param.grad.dtype is torch.bfloat16


class Table(nn.Module):
    """A weight of small integers, as a quantized base has it, beside what is trained."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        weight = torch.arange(35).view(7, 5).to(dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return x @ self.weight.float().t() / 35


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
@on_ranks(2)
def test_a_unit_of_integers(dtype):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), Table(dtype), nn.Linear(7, 5)).to(device())

    model, plain = make(), DDP(make())
    fully_shard(model[1])
    fully_shard(model)
    for each in (model, plain):
        trained = [param for param in each.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        for at in range(3):
            optimizer.zero_grad()
            backward(each, at)
            optimizer.step()
    model.load_state_dict(model.state_dict(), assign=True)
    for name, value in plain.module.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), value), name
    assert model[1].weight.dtype is dtype


@on_ranks(2)
def test_a_unit_may_be_frozen_and_thawed_however_many_marks_that_takes():
    def many():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).to(device())

    model, plain, marks = FSDP(many(), use_orig_params=True), many(), []
    for step in range(3):
        for each in (model, plain):
            for number, param in enumerate(each.parameters()):
                param.requires_grad_(step != 1 or number % 5 == 0)
            each.zero_grad()
            backward(model if each is model else DDP(plain), step)
            with torch.no_grad():
                for param in each.parameters():
                    if param.grad is not None:
                        param -= 0.1 * param.grad
        marks.append(model._unit.layout.marks)
    assert marks == [12, 7, 12]
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(param.detach()), expected.detach())


def doubled(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() * 2 for name, value in model.state_dict().items()}


def from_meta(model: nn.Module) -> None:
    state = doubled(model)
    model.to("meta").to_empty(device=device()).load_state_dict(state)


CHANGES = {  # of all parameters, to twice what they were
    "_apply": lambda model: model._apply(lambda tensor: tensor * 2),
    "load_state_dict": lambda model: model.load_state_dict(doubled(model)),
    "assign": lambda model: model.load_state_dict(doubled(model), assign=True),
    "to_empty": from_meta,
}


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_whatever_changes_all_parameters_an_optimizer_goes_on_with_the_same_ones(change, swap):
    """What torch's FSDP2 does in reset_sharded_param(), which programs do not call. With
    ``assign`` its optimizer would have the parameters from before, but for the setting."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model, plain = fully_shard(layers(1, WIDTH)), ddp()
        params = list(model.parameters())
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
        for at in range(4):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                backward(each, at)
                optimizer.step()
                optimizer.zero_grad()
            if at == 1:
                CHANGES[change](model)
                with torch.no_grad():
                    torch._foreach_mul_(list(plain.parameters()), 2)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert_same(model, plain)
        with pytest.raises(NotImplementedError, match="_get_fsdp_state is not there"):
            model._get_fsdp_state()  # it would have the reset_sharded_param() of each parameter
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("clears", ["model", "optimizer", "each by itself", "all but one"])
@on_ranks(2)
def test_gradients_that_are_cleared_have_no_memory_from_then_on(clears):
    """Many programs clear them after the forward, just before ``backward()``. They would be there
    beside the new ones till its end."""
    model = stack(2, use_orig_params=True)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    model(batch()).pow(2).sum().backward()  # what is made once is there after this
    model.zero_grad()
    gc.collect()
    before = settled_bytes()
    model(batch()).pow(2).sum().backward()
    grads = settled_bytes() - before
    assert grads >= sum(param.grad.to_local().nbytes for param in params)
    if clears == "model":
        model.zero_grad()
    elif clears == "optimizer":
        optimizer.zero_grad()
    else:
        for param in params[clears == "all but one" :]:
            param.grad = None
    left = model.engine.units[0].padded_shard.nbytes if clears == "all but one" else 0
    assert settled_bytes() - before == left


@on_ranks(2)
def test_what_a_program_has_kept_of_a_gradient_is_not_written_to():
    model = rows()
    flat, (weight, bias) = parts(model)
    flat.grad = torch.ones(len(flat), device=device())
    kept = weight.grad
    weight.grad, bias.grad = torch.full_like(weight, 3), torch.full_like(bias, 3)
    assert flat.grad[0] == 3 and flat.grad[15] == 3 and kept.to_local().eq(1).all()


@on_ranks(2)
def test_a_copy_of_a_gradient_has_nothing_of_the_others():
    model = rows()
    flat, (weight, _) = parts(model)
    flat.grad = torch.ones(len(flat), device=device())
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(weight.grad), buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert not vars(loaded)["minifsdp_unit_grad"]
    weight.grad = loaded
    assert flat.grad[:15].eq(1).all() and weight.grad is loaded
    flat.grad.mul_(2)
    assert loaded.to_local().eq(2).all()
