"""Decides by a model's configuration whether it can run here, and up to which context length it is exact."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from agentspec.backends.torch.model.target import layer_windows, rotaries
from agentspec.errors import ModelUnavailableError

LIMITS = ("attention_chunk_size", "attention_window_size", "local_attention", "window_size")


def require_decoder(config: Any, name: str) -> None:
    """Raise `ModelUnavailableError` for a model that does not continue a text token by token."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        message = f"{name!r} is an encoder-decoder model ({kind}); the local engine runs decoder-only models"
        raise ModelUnavailableError(message)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnavailableError(f"{name!r} is no language model that continues text: its type is {kind!r}")


def has_known_masks(config: Any) -> bool:
    """Whether each layer's mask follows from its kind and `sliding_window` alone, as the masks built here assume.

    A limit under another name (chunks, local windows inside the layers) would give wrong results in long texts only,
    where the self-check does not see it.
    """
    text = config.get_text_config()
    return layer_windows(text) is not None and not any(getattr(text, name, None) for name in LIMITS)


def max_exact_context(config: Any) -> int | None:
    """The longest context within which rotary angles do not depend on a forward's length; None for no such limit.

    LongRoPE has two sets of angles and chooses one by a forward's longest position. Slots computed earlier, or together
    with a draft, would then differ from those of a run without drafts. (The dynamic kind changes only beyond the
    model's context.)
    """
    ropes = [rope for rope in rotaries(config.get_text_config()) if rope.get("rope_type") == "longrope"]
    bounds = [rope["original_max_position_embeddings"] for rope in ropes]
    return min(bounds, default=None)
