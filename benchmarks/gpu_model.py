"""Models of random weights, made on the device they run on, and how fast that device copies."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentspec.backends.torch.loader import LoadedModel, prepare
from agentspec.backends.torch.model.target import TargetModel

CONTEXT = 16_384
COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
}
"""Llama 3's, by size (`config.json` of meta-llama/Llama-3.2-1B and Llama-3.1-8B), and one for tests."""


def build(shape: str, tokenizer: Any, device: torch.device, dtype: torch.dtype, *, spread: float = 0.02) -> LoadedModel:
    """A Llama of random weights with standard deviation `spread`, ready for the engine, float32 head included.

    Raises like `prepare`, which also checks that chains and trees are computed rightly.
    """
    sizes: dict[str, Any] = SHAPES[shape] | {"vocab_size": max(SHAPES[shape]["vocab_size"], len(tokenizer))}
    config = LlamaConfig(
        **sizes,
        max_position_embeddings=CONTEXT,
        initializer_range=spread,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    standard = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(standard)
    return prepare(module, tokenizer, name=f"random {shape}", fingerprint=f"random {shape}")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


def read_bytes(target: TargetModel) -> int:
    """Bytes of weights that a forward reads: all but the table of embeddings, of which it reads a row a token."""
    module = target.module
    table = module.get_input_embeddings().weight
    held = {id(tensor): tensor for part in module.modules() for tensor in vars(part).values() if _is_weight(tensor)}
    held |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values() if tensor is not table)


def _is_weight(value: object) -> bool:
    """Weights that layers of ours hold as plain attributes, copies in float32 or packed."""
    return isinstance(value, torch.Tensor)


def copied_bytes(device: torch.device) -> int:
    return COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"])
