"""Whether a model can run here by its configuration, and up to which length it is exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from agentspec.backends.torch.model.target import layer_windows
from agentspec.errors import ModelUnavailableError

LIMITS = ("attention_chunk_size", "attention_window_size", "local_attention", "window_size")


def require_decoder(config: Any, name: str) -> None:
    """Raises `ModelUnavailableError` for a model that does not continue a text token by token."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        message = f"{name!r} is an encoder-decoder model ({kind}); the local engine runs decoder-only models"
        raise ModelUnavailableError(message)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnavailableError(f"{name!r} is no language model that continues text: its type is {kind!r}")


def has_known_masks(config: Any) -> bool:
    """Whether what each layer attends to follows from its kind and `sliding_window`, which is what our masks build.

    A limit under any other name (chunks, local windows inside the layers) would show in long texts only.
    """
    text = config.get_text_config()
    return layer_windows(text) is not None and not any(getattr(text, name, None) for name in LIMITS)


def max_exact_context(config: Any) -> int | None:
    """The longest context with the same rotary angles at every length; None where they do not change inside it.

    LongRoPE has two sets of angles and takes one by a forward's longest position (the dynamic kind changes only behind
    the context it has): slots computed earlier, or along with a draft, would not be those of a run without.
    """
    ropes = _rotaries(config.get_text_config())
    bounds = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return min(bounds, default=None)


def _rotaries(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters, of each kind of layer where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    yield from nested if "rope_type" not in parameters and nested else [parameters]
