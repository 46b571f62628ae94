"""The target model: one forward over several sequences, each with committed rows, new tokens and a draft tree."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.backends.torch.attention import ATTENTION_NAME
from agentspec.backends.torch.head_input import HeadInput
from agentspec.backends.torch.kv_cache import Rows, SequenceCache, StateCache
from agentspec.backends.torch.packed import PackedCache, Piece, wanted_rows
from agentspec.backends.torch.tree_mask import attention_mask, tree_layout

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
LENGTH_BOUND_ROTARIES = frozenset({"dynamic", "longrope"})  # their angles depend on the longest position of a forward


class TargetModel:
    """A Hugging Face decoder-only model behind one method. Not thread-safe: the engine's thread owns it.

    `rewindable` says whether drafts can be verified and rows reused; without it tokens run strictly one after another.
    `batched` says whether several sequences share a forward; without it each gets one of its own, in turn.
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
        self._packs = rewindable and self.attention == ATTENTION_NAME
        self.batched = self._packs and LENGTH_BOUND_ROTARIES.isdisjoint(_rotaries(config))
        self._config = config
        self._groups = _groups(config)
        self._windows = layer_windows(config) or {}
        parameters = inspect.signature(module.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache_params"

    def new_rows(self, capacity: int) -> Rows:
        return SequenceCache(capacity) if self.rewindable else StateCache(self._config)

    @torch.inference_mode()
    def forward_batch(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """For each piece its logits [outputs, vocab] in float32: after the chain's last token, then each draft node.

        Appends a row to its sequence for every token given; `rows.commit` must follow and say which to keep. After an
        exception the rows are as if nothing had happened.
        """
        if not self.batched and len(pieces) > 1:
            return [logits for piece in pieces for logits in self.forward_batch([piece])]
        wanted = wanted_rows(pieces)
        logits: Tensor = self._run(pieces, wanted if len(wanted) else np.zeros(1, np.int64)).logits[0].float()
        outputs = [piece.outputs for piece in pieces]
        return list(logits[: len(wanted)].split_with_sizes(outputs))

    @torch.inference_mode()
    def states_batch(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """For each piece what the output head would read, [tokens, width] in float32: the hidden state behind every
        token given, after the last norm. Rows as with `forward_batch`; the head itself hardly runs.
        """
        if not self.batched and len(pieces) > 1:
            return [states for piece in pieces for states in self.states_batch([piece])]
        sizes = [len(piece) for piece in pieces]
        with HeadInput(self.module, most_rows=1) as head:
            self._run(pieces, np.arange(sum(sizes)))
        return list(head.states.split_with_sizes(sizes))

    def forward(
        self, rows: Rows, chain: Sequence[int], tokens: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Tensor:
        """The logits [1 + len(tokens), vocab] of `forward_batch` for one sequence alone."""
        return self.forward_batch([Piece(rows, chain, tokens, parents)])[0]

    def prefill(self, rows: Rows, chain: Sequence[int]) -> None:
        """Compute and keep the rows of `chain`."""
        self.forward_batch([Piece(rows, chain, wanted=False)])
        rows.commit(len(chain), ())

    def _run(self, pieces: Sequence[Piece], wanted: NDArray[np.int64]) -> Any:
        """The forward; `wanted` are the rows that reach the head, ascending and at least one."""
        return self._packed(pieces, wanted) if self._packs else self._own(pieces, wanted)

    def _packed(self, pieces: Sequence[Piece], wanted: NDArray[np.int64]) -> Any:
        cache = PackedCache(pieces, self._layer_windows, self._groups, self.dtype, self.device)
        return self.module(
            input_ids=_ids(pieces, self.device),
            position_ids=torch.from_numpy(cache.positions)[None].to(self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.from_numpy(wanted).to(self.device),
        )

    def _own(self, pieces: Sequence[Piece], wanted: NDArray[np.int64]) -> Any:
        """One sequence through the model's own attention; the rows it wants are its last ones."""
        (piece,) = pieces
        rows, where = piece.rows, dict[str, Any]()
        if isinstance(rows, SequenceCache):
            layout = tree_layout(len(piece.chain), piece.parents)
            masks = {
                kind: attention_mask(layout, rows.length, window=window, groups=1, dtype=self.dtype).to(self.device)
                for kind, window in self._windows.items()
            }
            where["position_ids"] = torch.from_numpy(rows.length + layout.depths)[None].to(self.device)
            where["attention_mask"] = masks if len(masks) > 1 else next(iter(masks.values()))
        where[self._cache_name] = rows if isinstance(rows, SequenceCache) else rows.native
        ids = _ids(pieces, self.device)
        return self.module(input_ids=ids, use_cache=True, logits_to_keep=len(wanted), **where)

    @property
    def _layer_windows(self) -> list[int | None]:
        """How far each layer looks back, by its index."""
        kinds = getattr(self._config, "layer_types", None)
        if kinds is None:
            return list(self._windows.values()) * int(self._config.num_hidden_layers)
        return [self._windows[kind] for kind in kinds]

    def row_bytes(self) -> int:
        """Bytes of one key/value row over all layers; 0 where rows cannot be counted."""
        if not self.rewindable:
            return 0
        rows = SequenceCache(1)
        self.forward(rows, [0])
        return rows.nbytes // rows.capacity


def _ids(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    return torch.tensor([[token for piece in pieces for token in (*piece.chain, *piece.tokens)]], device=device)


def _rotaries(config: Any) -> set[Any]:
    """The kinds of rotary positions that the layers use."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]  # by kind of layer
    return {each.get("rope_type") or each.get("type") for each in nested or [parameters]}


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
