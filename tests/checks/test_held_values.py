"""held_values.py: what holds values of parameters in a second place is refused by name; what is
right is let through."""

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard
from minifsdp.checks.held_values import check_memory
from tests.ranks import device, on_ranks
from tests.small import Block, batch

WRAPS = {
    "chunks": lambda m: FSDP(m, auto_wrap_policy=ModuleWrapPolicy({Block})),
    "rows": lambda m: FSDP(m, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True),
    "fully_shard": lambda m: [fully_shard(b) for b in (m[1], m[2])] and fully_shard(m),
}
every_wrap = pytest.mark.parametrize("wrap", WRAPS)


def model():
    torch.manual_seed(0)
    blocks = [Block(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 6), *blocks).to(device())


def modules(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        setattr(module, name, tensor)
    return {"": module}


@pytest.mark.direct
class TestMemory:
    def test_views_that_share_elements_are_refused_and_others_are_not(self):
        base = torch.zeros(4, 6)

        def param(view):
            return nn.Parameter(view)

        check_memory(modules(a=param(base[:2]), b=param(base[2:])))  # as the weights of an RNN
        check_memory(modules(a=param(base[:, :3]), b=param(base[:, 3:])))
        check_memory(modules(a=param(base[:, ::2]), b=param(base[:, 1::2])))
        for one, other in (
            (base, base[3]),
            (base[:3], base[2:]),
            (base[:, :4], base[:, 3:]),
            (base, base.t()),
        ):
            for a, b in ((one, other), (other, one)):
                with pytest.raises(ValueError, match=r"'[ab]' and '[ab]' .* in one memory"):
                    check_memory(modules(a=param(a), b=param(b)))

    def test_others_may_lie_between_the_two(self):
        base = torch.zeros(100)
        for inner in (base[10:20], base[50:60]):
            with pytest.raises(ValueError, match="'a' and 'c' are"):
                module = modules(a=nn.Parameter(base), c=nn.Parameter(inner))[""]
                module.register_buffer("b", torch.zeros(3))
                check_memory({"": module})
        module = nn.Module()
        for name, buffer in {"long": base, "short": base[10:20]}.items():
            module.register_buffer(name, buffer)
        module.weight = nn.Parameter(base[50:60])
        with pytest.raises(ValueError, match="'long' and 'weight' are"):
            check_memory({"": module})

    def test_one_parameter_in_two_places_is_no_mistake(self):
        param = nn.Parameter(torch.zeros(2))
        check_memory(modules(a=param, b=param))
        check_memory(modules(a=nn.Parameter(torch.zeros(0)), b=nn.Parameter(torch.zeros(0))))

    def test_a_buffer_counts_only_beside_a_parameter(self):
        module, shared = nn.Module(), torch.zeros(2)
        module.register_buffer("one", shared)
        module.register_buffer("other", shared.view(2))
        check_memory({"": module})
        module.weight = nn.Parameter(shared)
        with pytest.raises(ValueError, match="in one memory"):
            check_memory({"": module})

    def test_on_the_meta_device_nothing_is_shared(self):
        with torch.device("meta"):
            check_memory(modules(a=nn.Parameter(torch.zeros(2)), b=nn.Parameter(torch.zeros(2))))


@pytest.mark.parametrize("wrap", ["chunks", "rows"])
@on_ranks(2)
def test_two_units_in_one_memory_are_refused_before_anything_is_changed(wrap):
    plain = model()
    plain[2][0].weight.data = plain[1][0].weight.data
    with pytest.raises(ValueError, match=r"'1\.0\.weight' and '2\.0\.weight'.*tie_weights"):
        WRAPS[wrap](plain)
    plain[2][0].weight.data = plain[2][0].weight.data.clone()
    WRAPS[wrap](plain)(batch()).sum().backward()


KEPT = {
    "a list": lambda m: [m[0].weight, m[1][0].weight],
    "a dict of lists": lambda m: {"decayed": [m[2][0].weight]},
    "a tuple": lambda m: (m[1][0].bias,),
}


@every_wrap
@pytest.mark.parametrize("kind", KEPT)
@on_ranks(2)
def test_parameters_in_an_attribute_are_refused_at_the_first_step(kind, wrap):
    plain = model()
    plain.kept = KEPT[kind](plain)
    wrapped = WRAPS[wrap](plain)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'kept' \(\w+\) holds parameter '0\.\w+'.*before"):
            wrapped(batch())
    del wrapped.kept
    wrapped(batch()).sum().backward()


@every_wrap
@on_ranks(2)
def test_a_list_of_an_rnn_and_one_of_parameters_that_are_ignored_are_no_mistake(wrap):
    class Recurrent(nn.Sequential):
        def forward(self, x):
            return self[0](self[1](self[2](self.rnn(x)[0])))

    plain = Recurrent(*model())
    plain.rnn = nn.LSTM(6, 6).to(device())
    WRAPS[wrap](plain)(batch()).sum().backward()
