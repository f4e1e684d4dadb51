"""Models of transformers: sharded, they compute what DistributedDataParallel does, bit for bit.

Needs `make test-hf`, or `pip install -e ".[hf]"`.
"""

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

WHY = "models of transformers: `make test-hf` installs what they need"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("peft", reason=WHY)

import peft
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard, register_fsdp_forward_method
from minifsdp.comm.pieces import Pieces
from tests.hf.models import MODELS, TIED, WAYS, WRITERS, batch, blocks, make, train
from tests.ranks import device, on_ranks
from tests.small import travels

by_way = pytest.mark.parametrize("way", WAYS)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Its state dict as a plain model would have it, on every rank."""
    if isinstance(model, (FSDP, DDP)):
        return (model.module if isinstance(model, DDP) else model).state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in model.state_dict().items()}  # fmt: skip


def compare(model: nn.Module, plain: nn.Module, name: str, average: bool = False) -> None:
    """Train both, and compare all losses and all that they have learned."""
    ddp = plain if average else DDP(plain, find_unused_parameters=True)
    before = {key: value.clone() for key, value in whole(ddp).items()}
    expected = train(ddp, name, average=average)
    for loss, other in zip(train(model, name), expected, strict=True):
        assert torch.equal(loss, other)
    found = whole(model)
    assert found.keys() == before.keys()
    for key, value in whole(ddp).items():
        assert torch.equal(found[key], value), key
    assert any(not torch.equal(found[key], value) for key, value in before.items())


@by_way
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_a_model_is_trained_as_with_ddp(name, way):
    compare(WAYS[way](make(name)), make(name), name)


@by_way
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral"])
@on_ranks(2)
def test_gradient_checkpointing(name, reentrant, way):
    model, plain = make(name), make(name)
    if name == "gpt2":  # after wrapping
        model = WAYS[way](model)
    for either in (model, plain):
        either.activation_checkpointing_enable({"use_reentrant": reentrant})
    if name != "gpt2":
        model = WAYS[way](model)
    compare(model, plain, name, average=True)
    calls = count_calls(model, tuple(blocks(plain)))
    model(**batch(name, 0)).loss.backward()
    assert set(calls.values()) == {2}, "each block is computed again in the backward"


def count_calls(model: nn.Module, classes: tuple[type, ...]) -> Counter[nn.Module]:
    """How often blocks of these classes run from here on."""
    calls: Counter[nn.Module] = Counter()
    for block in model.modules():
        if isinstance(block, classes):
            leaf = next(part for part in block.modules() if not [*part.children()])
            calls[leaf] = 0
            leaf.register_forward_hook(lambda leaf, *_: calls.update([leaf]))
    return calls


@by_way
@pytest.mark.parametrize("name", WRITERS)
@on_ranks(2)
def test_what_was_learned_is_loaded_into_a_plain_model_and_writes_the_same(name, way):
    model, plain = WAYS[way](make(name)), make(name)
    train(model, name)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options) if way == "fully_shard" else whole(model)
    if dist.get_rank() == 0 or way != "fully_shard":  # torch gives it to the first rank only
        assert plain.load_state_dict(state) == ([], [])
    for value in plain.state_dict().values():
        dist.broadcast(value, 0)
    words, plain = batch(name, 9)["input_ids"], plain.eval()
    expected = plain.generate(words, max_new_tokens=8, do_sample=False)
    assert not torch.equal(expected, make(name).eval().generate(words, max_new_tokens=8)), "learned"
    model.eval()
    if way == "fully_shard":
        # generate() calls parts of the model, such as T5's encoder, which are not units.
        register_fsdp_forward_method(model, "generate")
        written = [model.generate(words, max_new_tokens=8, do_sample=False)]
    else:
        written = []
        for recurse in (False, True):
            with FSDP.summon_full_params(model, recurse=recurse, writeback=False):
                written.append(model.generate(words, max_new_tokens=8, do_sample=False))
    for found in written:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("way", ["chunks", "rows"])
@on_ranks(2)
def test_a_wrapper_that_generates_outside_of_summon_full_params_is_told_so(way):
    model = WAYS[way](make("llama")).eval()
    message = "is sharded now|mixed torch.Tensor and DTensor"
    with pytest.raises(RuntimeError, match=message):
        model.generate(batch("llama", 0)["input_ids"], max_new_tokens=2)


@by_way
@pytest.mark.parametrize("name", TIED)
@on_ranks(2)
def test_what_was_tied_stays_tied(name, way):
    model = WAYS[way](make(name))
    train(model, name)
    names = defaultdict(list)
    for key, tensor in make(name).state_dict().items():
        names[tensor.data_ptr()].append(key)
    tied = [keys for keys in names.values() if len(keys) > 1]
    state, listed = whole(model), [key for key, _ in model.named_parameters()]
    assert tied
    for first, *others in tied:
        assert all(torch.equal(state[first], state[other]) for other in others)
        assert not {*others} & {*listed}


def with_lora(model: nn.Module, targets: list[str]) -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a name that transformers has changed
        return peft.get_peft_model(model, config)


TARGETS = {"llama": ["q_proj", "v_proj"], "t5": ["q", "v"], "bert": ["query", "value"]}


def with_blocks(model: nn.Module) -> nn.Module:
    model._no_split_modules = model.base_model.model._no_split_modules
    return model


@pytest.mark.parametrize("way", ["rows", "fully_shard"])
@pytest.mark.parametrize("name", TARGETS)
@on_ranks(2)
def test_lora(name, way):
    """peft freezes the model and trains a few small matrices in each block."""
    model, plain = (with_lora(make(name), TARGETS[name]) for _ in range(2))
    model = WAYS[way](with_blocks(model))
    compare(model, plain, name)
    state = whole(model)
    adapters = peft.get_peft_model_state_dict(plain, state_dict=state)
    assert adapters and all("lora" in key for key in adapters)
    found = with_lora(make(name), TARGETS[name])
    result = peft.set_peft_model_state_dict(found, adapters)
    assert not result.unexpected_keys
    for key, value in found.state_dict().items():
        assert torch.equal(value, state[key]), key


def low_with_adapters(name: str, config: Callable[[], peft.PeftConfig]) -> nn.Module:
    """As peft makes it: the model is low, and the adapters are full."""
    model = make(name).to(torch.bfloat16)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = with_blocks(peft.get_peft_model(model, config()))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16, torch.float32}
    return model


ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    ),
    "DoRA": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, use_dora=True
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("way", ["rows", "fully_shard"])
@pytest.mark.parametrize("kind", ADAPTERS)
@on_ranks(2)
def test_adapters_may_have_another_dtype_than_the_model(kind, way):
    """peft's default for a model in bfloat16, without any cast by the program."""
    model, plain = (low_with_adapters("llama", ADAPTERS[kind]) for _ in range(2))
    compare(WAYS[way](model), plain, "llama")


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Bytes of the whole tensors that are gathered and that are reduced in the block."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        def change(method: Callable[..., Any]) -> Callable[..., Any]:
            def counted(comm: Any, unit: Any, whole: torch.Tensor | Pieces, *args: Any) -> Any:
                counts[name] += whole.numel() * whole.dtype.itemsize
                return method(comm, unit, whole, *args)

            return counted

        return change

    with (
        travels("all_gather", counting("gathered")),
        travels("reduce_scatter", counting("reduced")),
    ):
        yield counts


@pytest.mark.parametrize("way", ["rows", "fully_shard"])
@pytest.mark.parametrize("name", TARGETS)
@on_ranks(2)
def test_of_lora_only_what_is_trained_is_reduced(name, way):
    """Frozen parameters are gathered as if they were trained, and their gradients do not exist."""
    found = []
    for frozen in (True, False):
        model = with_blocks(with_lora(make(name), TARGETS[name]))
        if not frozen:
            model.requires_grad_(True)
        trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
        model = WAYS[way](model)
        train(model, name, steps=1)
        with counted_bytes() as counts:
            train(model, name, steps=1)
        assert trained <= counts["reduced"] <= 1.05 * trained
        found.append(counts)
    lora, everything = found
    marks = everything["gathered"] - lora["gathered"]  # of what was not used (rows.py)
    assert lora["gathered"] > 0 and 0 <= marks < 0.01 * lora["gathered"], (marks, found)
    assert lora["reduced"] < everything["reduced"] / 10


@on_ranks(2)
def test_lora_in_chunks_needs_units_that_are_frozen_or_trained_as_a_whole():
    """A chunk of a unit has no parameters of its own. peft's policy makes units of the matrices."""
    with pytest.raises(ValueError, match="requires_grad"):
        WAYS["chunks"](with_blocks(with_lora(make("llama"), TARGETS["llama"])))
    model, plain = (with_lora(make("llama"), TARGETS["llama"]) for _ in range(2))
    with patch.dict(os.environ, FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer"):
        policy = peft.utils.other.fsdp_auto_wrap_policy(model)
    compare(FSDP(model, auto_wrap_policy=policy), plain, "llama")


@by_way
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@on_ranks(2, timeout=300)
def test_blocks_that_are_compiled(name, way):
    model, plain = make(name), make(name)
    for either in (model, plain):
        for block in either.modules():
            if isinstance(block, tuple(blocks(either))):
                block.compile(backend="aot_eager")
    compare(WAYS[way](model), plain, name)


# ------------------------------------------------------------------------------ layers at random

SPEECH = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "hidden_dropout": 0,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "attention_dropout": 0,
    "activation_dropout": 0, "feat_proj_dropout": 0, "mask_time_prob": 0,
}  # fmt: skip


def speech(layerdrop: float) -> nn.Module:
    torch.manual_seed(0)
    config = hf.Wav2Vec2Config(layerdrop=layerdrop, **SPEECH)
    return hf.Wav2Vec2Model(config).to(device()).train()


@by_way
@on_ranks(2)
def test_a_model_that_drops_layers_at_random_runs_the_same_ones_on_all_ranks(way):
    """transformers has it run all of them where it sees by a mark that they are sharded."""
    plain, model = DDP(speech(0)), speech(0.5)
    classes = {type(layer) for layer in model.encoder.layers}
    if way == "fully_shard":
        for layer in model.encoder.layers:
            fully_shard(layer)
        model = fully_shard(model)
    else:
        policy = ModuleWrapPolicy(classes)
        model = FSDP(model, auto_wrap_policy=policy, use_orig_params=way == "rows")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    torch.manual_seed(dist.get_rank())  # each rank would drop others
    for _ in range(3):
        sound, losses = torch.randn(2, 400, device=device()), []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            loss = each(sound).last_hidden_state.pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)


@on_ranks(2)
def test_a_scalar_parameter_is_refused_in_rows_with_what_to_do():
    """CLIP's temperature. torch refuses it, too."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    image = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "patch_size": 16}
    config = hf.CLIPConfig(
        text_config={**text, "num_hidden_layers": 1},
        vision_config={**image, "num_hidden_layers": 1, "image_size": 32},
    )
    match = r"'logit_scale' has no dimension.*ignored_params=.*ignored_states=.*=False"
    for shard in (fully_shard, lambda model: FSDP(model, use_orig_params=True)):
        with pytest.raises(ValueError, match=match):
            shard(hf.CLIPModel(config).to(device()))
    model = hf.CLIPModel(config).to(device())
    fully_shard(model, ignored_params={model.logit_scale})
    FSDP(hf.CLIPModel(config).to(device()))
