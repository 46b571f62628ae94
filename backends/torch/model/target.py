"""The target model: runs one forward over several sequences, each with committed slots, new tokens and a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.backends.torch.model.batch import (
    ATTENTION_NAME,
    BatchItem,
    PackedCache,
    attention_mask,
    logit_rows,
    packed_ids,
    tree_layout,
)
from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.model.kv_cache import SequenceCache

if TYPE_CHECKING:
    from agentspec.backends.torch.model.graphs.recording import Graphs

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
LENGTH_BOUND_ROTARIES = frozenset({"dynamic", "longrope"})  # their angles depend on the longest position of a forward


class TargetModel:
    """Runs a decoder-only model whose only state are KV slots. Not thread-safe: the engine's thread owns it.

    `batched` says whether several sequences share a forward; otherwise each runs in a forward of its own. `graphs`,
    unless None, replays small forwards as CUDA graphs.
    """

    def __init__(self, module: Any) -> None:
        config = module.config.get_text_config()
        self.module = module
        self.vocab_size: int = config.vocab_size
        self.context_length: int = getattr(config, "max_position_embeddings", None) or 1 << 20
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.attention: str = config._attn_implementation
        self.graphs: Graphs | None = None
        self._packs = self.attention == ATTENTION_NAME
        ropes = {rope.get("rope_type") or rope.get("type") for rope in rotaries(config)}
        self.batched = self._packs and LENGTH_BOUND_ROTARIES.isdisjoint(ropes)
        self._groups = _groups(config)
        self._windows = layer_windows(config) or {}
        kinds = getattr(config, "layer_types", None) or [*self._windows] * int(config.num_hidden_layers)
        self.layer_windows = [
            self._windows[kind] for kind in kinds
        ]  # how far each layer looks back; None: to the start

    def new_cache(self, capacity: int) -> SequenceCache:
        return SequenceCache(capacity)

    @torch.inference_mode()
    def forward_batch(self, items: Sequence[BatchItem]) -> list[Tensor]:
        """Return the logits [outputs, vocab] of each item in float32: after its last token, then after each draft node.

        Writes a KV slot for every token given; the caller must then call `kv_cache.commit` with the slots to keep.
        After an exception the caches are as before the call.
        """
        if not self.batched and len(items) > 1:
            return [logits for item in items for logits in self.forward_batch([item])]
        wanted = logit_rows(items)
        logits = self._logits(items, wanted if len(wanted) else np.zeros(1, np.int64))
        return list(logits[: len(wanted)].split_with_sizes([item.outputs for item in items]))

    def _logits(self, items: Sequence[BatchItem], wanted: NDArray[np.int64]) -> Tensor:
        """The logits [len(wanted), vocab] of the rows `wanted`, from a recorded forward if one is large enough."""
        if self.graphs is not None and self.graphs.fits(sum(map(len, items))):
            logits = self.graphs.replay(items)
            return logits.index_select(0, to_device(wanted, self.device))
        computed: Tensor = self.run(items, wanted).logits[0]
        return computed.float()

    def forward(
        self,
        kv_cache: SequenceCache,
        tokens: Sequence[int],
        draft_tokens: Sequence[int] = (),
        draft_parents: Sequence[int] = (),
    ) -> Tensor:
        """The logits [1 + len(draft_tokens), vocab] of `forward_batch` for one sequence alone."""
        return self.forward_batch([BatchItem(kv_cache, tokens, draft_tokens, draft_parents)])[0]

    def prefill(self, kv_cache: SequenceCache, tokens: Sequence[int]) -> None:
        self.forward_batch([BatchItem(kv_cache, tokens, needs_logits=False)])
        kv_cache.commit(len(tokens), ())

    def run(self, items: Sequence[BatchItem], wanted: NDArray[np.int64]) -> Any:
        """Run the forward; `wanted` are the rows passed to the output head, ascending and at least one."""
        return self._packed(items, wanted) if self._packs else self._own(items, wanted)

    def _packed(self, items: Sequence[BatchItem], wanted: NDArray[np.int64]) -> Any:
        cache = PackedCache(items, self.layer_windows, self._groups, self.dtype, self.device)
        return self.module(
            input_ids=to_device(packed_ids(items), self.device)[None],
            position_ids=to_device(cache.positions, self.device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=to_device(wanted, self.device),
        )

    def _own(self, items: Sequence[BatchItem], wanted: NDArray[np.int64]) -> Any:
        """Run one sequence with the model's own attention; the logits it needs are those of its last rows."""
        (item,) = items
        past, layout = item.kv_cache.length, tree_layout(len(item.tokens), item.draft_parents)
        masks = {
            kind: attention_mask(layout, past, window=window, groups=1, dtype=self.dtype, device=self.device)
            for kind, window in self._windows.items()
        }
        return self.module(
            input_ids=to_device(packed_ids(items), self.device)[None],
            position_ids=to_device(past + layout.depths, self.device)[None],
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=item.kv_cache,
            use_cache=True,
            logits_to_keep=len(wanted),
        )

    def slot_bytes(self) -> int:
        cache = SequenceCache(1)
        self.forward(cache, [0])
        return cache.nbytes // cache.capacity


def rotaries(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters; one set for each kind of layer if the kinds differ."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return nested if nested and "rope_type" not in parameters else [parameters]


def layer_windows(config: Any) -> dict[str, int | None] | None:
    """How far each kind of attention layer looks back (None: everything); None if the model has an unknown kind."""
    window = getattr(config, "sliding_window", None)
    fallback = ["sliding_attention" if window else "full_attention"]
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or fallback)
    if not KNOWN_LAYERS.issuperset(kinds):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _groups(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", 1)
    return int(heads // (getattr(config, "num_key_value_heads", None) or heads))
