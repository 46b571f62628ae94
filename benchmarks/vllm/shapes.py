"""The models that the engines run, as folders with a `config.json` and no weights, and the options of vLLM's `LLM`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentspec.benchmarks.gpu.random_model import CONTEXT, SHAPES
from agentspec.benchmarks.vllm import SCRIPTED

OFF = "off"
WIDTH = 7  # drafted tokens of a chain
TIED = ("1b", "3b")  # Llama 3.2 shares the table of its inputs with its head
HEAD = 64  # the least width of a head that vLLM's attention has on all devices
PLAIN = "LlamaForCausalLM"
DRAFTER = "drafter"  # folder of a model that drafts, one layer with random weights, whose drafts are never right
WORDS = 512  # tokens of the small models that answer
GIB = 1 << 30

ANSWERING = {
    "cuda": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": WORDS,
    },
    "cpu": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": WORDS,
    },
}
"""Shapes of the models of the comparison of answers, by the kind of device."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter, vLLM's method for it with the process's variables, whether it is our cache, which learns, and whether
    it has a draft model.
    """

    drafter: str
    method: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False
    modelled: bool = False

    def speculative_config(self, model: Path) -> Mapping[str, Any] | None:
        """vLLM's argument of that name, for engines of that model."""
        drafter = {"model": str(model / DRAFTER)} if self.modelled else {}
        return {"method": self.method, "num_speculative_tokens": WIDTH, **drafter} if self.method else None


_OFF, _V2 = {"AGENTSPEC_VLLM": "off"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
VARIANTS = {
    variant.drafter: variant
    for variant in (
        Variant(OFF, variables=_OFF),
        Variant("Arctic", "suffix", _OFF),
        Variant("agentspec", "suffix", cached=True),
        Variant("ngram_gpu", "ngram_gpu", _OFF),
        Variant("agentspec V2", "ngram_gpu", {"AGENTSPEC_VLLM_V2": "on"}, cached=True),
        Variant("EAGLE", "eagle", _OFF | _V2, modelled=True),
        Variant("agentspec with EAGLE", "eagle", {"AGENTSPEC_VLLM_HYBRID": "on"} | _V2, cached=True, modelled=True),
    )
}
"""What can be compared, by name: no drafts first."""


def scripted_model(folder: Path, shape: str, vocabulary: int) -> Path:
    """A model of a shape in `SHAPES`, with at least `vocabulary` tokens, whose answers are told to it."""
    sizes = SHAPES[shape] | {"vocab_size": max(SHAPES[shape]["vocab_size"], vocabulary)}
    _written(folder / DRAFTER, "EagleLlamaForCausalLM", sizes | {"num_hidden_layers": 1}, tied=False)
    return _written(folder, SCRIPTED, sizes, tied=shape in TIED)


def answering_model(folder: Path, kind: str) -> Path:
    """A small model whose answers are its own. `kind` is cuda or cpu."""
    return _written(folder, PLAIN, ANSWERING[kind], tied=False)


def _written(folder: Path, architecture: str, sizes: Mapping[str, int], *, tied: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **sizes,
        "architectures": [architecture],
        "model_type": "llama",
        "head_dim": max(HEAD, sizes["hidden_size"] // sizes["num_attention_heads"]),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_options(
    model: Path, kind: str, variant: Variant, *, length: int = CONTEXT, room: int = GIB, together: int = 16
) -> str:
    """The options of vLLM's `LLM` as JSON, with `device`, for texts of at most `length` tokens and `room` bytes of KV
    slots. Engines share a device, so none takes what is free.
    """
    options: dict[str, Any] = {
        "device": kind,
        "model": str(model),
        "dtype": "float32" if kind == "cpu" else "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
        "seed": 0,
        "max_model_len": length,
        "max_num_seqs": max(16, together),
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": room,
        "speculative_config": variant.speculative_config(model),
    }
    return json.dumps(options | _device_options(kind, together * (WIDTH + 1)))


def _device_options(kind: str, most: int) -> dict[str, Any]:
    """On a CPU models are not compiled, which takes vLLM minutes there. Elsewhere steps of up to 128 tokens, or `most`
    of them, are recorded as CUDA graphs.
    """
    if kind == "cpu":
        return {"enforce_eager": True}
    sizes = [1 << power for power in range(11) if 1 << power <= max(128, most)]
    return {"gpu_memory_utilization": 0.05, "compilation_config": {"cudagraph_capture_sizes": sizes}}
