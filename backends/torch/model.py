"""The target model: one forward over committed rows, a chain of new tokens, and a draft tree behind it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentspec.backends.torch.attention import ATTENTION_NAME
from agentspec.backends.torch.kv_cache import SequenceCache, StateCache
from agentspec.backends.torch.tree_mask import Layout, attention_mask, tree_layout

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})

Rows = SequenceCache | StateCache


class TargetModel:
    """A Hugging Face decoder-only model behind one method. Not thread-safe: the engine's thread owns it.

    `rewindable` says whether drafts can be verified and rows reused; without it tokens run strictly one after another.
    """

    def __init__(self, module: Any, *, rewindable: bool) -> None:
        config = module.config.get_text_config()
        self.module = module
        self.rewindable = rewindable
        self.vocab_size: int = config.vocab_size
        self.context_length: int = getattr(config, "max_position_embeddings", None) or 1 << 20
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.attention: str = config._attn_implementation
        self._config = config
        self._groups = _groups(config) if self.attention == ATTENTION_NAME else 1
        self._windows = layer_windows(config) or {}
        parameters = inspect.signature(module.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache_params"

    def new_rows(self, capacity: int) -> Rows:
        return SequenceCache(capacity) if self.rewindable else StateCache(self._config)

    @torch.inference_mode()
    def forward(
        self, rows: Rows, chain: Sequence[int], tokens: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Tensor:
        """Logits [1 + len(tokens), vocab] in float32: after the chain's last token, then after every draft node.

        Appends a row for every token given; `rows.commit` must follow and say which to keep.
        """
        ids = torch.tensor([[*chain, *tokens]], device=self.device)
        where = self._where(rows, tree_layout(len(chain), parents)) if isinstance(rows, SequenceCache) else {}
        cache = {self._cache_name: rows if isinstance(rows, SequenceCache) else rows.native}
        out = self.module(input_ids=ids, use_cache=True, logits_to_keep=1 + len(tokens), **cache, **where)
        logits: Tensor = out.logits[0].float()
        return logits

    def prefill(self, rows: Rows, chain: Sequence[int]) -> None:
        """Compute and keep the rows of `chain`."""
        self.forward(rows, chain)
        rows.commit(len(chain), ())

    def _where(self, rows: SequenceCache, layout: Layout) -> dict[str, Any]:
        positions = torch.from_numpy(rows.length + layout.depths)[None].to(self.device)
        masks = {kind: self._mask(rows.length, layout, window) for kind, window in self._windows.items()}
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
        return {"position_ids": positions, "attention_mask": mask}

    def _mask(self, past: int, layout: Layout, window: int | None) -> Tensor | None:
        alone = len(layout) == 1 and (window is None or past < window)
        if alone and self.attention == ATTENTION_NAME:
            return None  # one row that sees everything needs no mask
        mask = attention_mask(layout, past, window=window, groups=self._groups, dtype=self.dtype)
        return mask.to(self.device)


def layer_windows(config: Any) -> dict[str, int | None] | None:
    """For each kind of attention layer how far it looks back (None: everything); None for kinds unknown here."""
    window = getattr(config, "sliding_window", None)
    fallback = ["sliding_attention" if window else "full_attention"]
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or fallback)
    if not KNOWN_LAYERS.issuperset(kinds):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _groups(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", 1)
    return int(heads // (getattr(config, "num_key_value_heads", None) or heads))
