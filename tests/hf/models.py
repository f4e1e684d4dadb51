"""Small models of transformers with random weights, and what they are trained on.

Nothing is downloaded: each model is made from a configuration. There is no dropout, since ranks
and runs would have to draw the same numbers in the same order.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard
from tests.ranks import device

WORDS = 64
SMALL = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, **SMALL,
}  # fmt: skip
BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **SMALL}
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0,
    "decoder_start_token_id": 0, "pad_token_id": 0, **SMALL,
}  # fmt: skip

MODELS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **GPT2)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "llama, tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(tie_word_embeddings=True, **LLAMA)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **LLAMA)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=WORDS, **BERT)),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(image_size=16, patch_size=4, num_labels=5, **BERT)
    ),
}
TIED = ("gpt2", "llama, tied", "t5", "bert")
WRITERS = ("gpt2", "llama", "llama, tied", "mixtral", "t5")  # those that have generate()


def make(name: str) -> nn.Module:
    """The same on every rank and in every call."""
    torch.manual_seed(0)
    return MODELS[name]().to(device())


def blocks(model: nn.Module) -> set[type]:
    """The classes that transformers never splits, without embeddings, whose weight may be shared
    with the head."""
    names = {name for name in model._no_split_modules if "Embeddings" not in name}
    return {type(module) for module in model.modules() if type(module).__name__ in names}


def in_chunks(model: nn.Module) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy(blocks(model)))


def in_rows(model: nn.Module) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy(blocks(model)), use_orig_params=True)


def by_fully_shard(model: nn.Module) -> nn.Module:
    classes = tuple(blocks(model))
    for module in list(model.modules()):
        if isinstance(module, classes):
            fully_shard(module)
    return fully_shard(model)


WAYS = {"chunks": in_chunks, "rows": in_rows, "fully_shard": by_fully_shard}


def batch(name: str, step: int) -> dict[str, Tensor]:
    """Other data on every rank."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        found = {"pixel_values": pixels, "labels": torch.randint(5, (2,), generator=generator)}
    else:
        words = torch.randint(3, WORDS, (2, 10), generator=generator)
        found = {"input_ids": words, "labels": words.flip(1) if name == "t5" else words.clone()}
    return {key: tensor.to(device()) for key, tensor in found.items()}


def train(model: nn.Module, name: str, steps: int = 3, average: bool = False) -> list[Tensor]:
    """The losses.

    With `average`, gradients are averaged over the ranks here, as DDP would do it. DDP itself does
    not take reentrant checkpoints: it sees each parameter ready twice.
    """
    model.train()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(**batch(name, step)).loss
        loss.backward()
        for param in trained if average else ():
            param.grad.div_(dist.get_world_size())
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
