"""vLLM's own hook for drafters, `"method": "custom_class"`: experimental there, and without request ids."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentspec.backends.vllm.cache_router import drafts_here, open_drafter, require_supported
from agentspec.backends.vllm.drafting import ServerDrafter, Turn
from agentspec.backends.vllm.proposer import turn_of
from agentspec.backends.vllm.request_state import Conversation
from agentspec.cache.index import DEPTH
from agentspec.errors import ConfigurationError

Key = tuple[int, bytes, bytes]


class SuffixProposer:
    """Recognises each row by its tokens: a row that goes on from no row of the step before is a new request.

    A row that is missing has ended; one that was only preempted begins anew where it stood. Salts, adapters and where
    an output may end are not seen here: every request belongs to the server's tenant, and what the target samples
    behind an end is remembered with it.
    """

    def __init__(self, vllm_config: Any) -> None:
        require_supported()
        if vllm_config.model_config.enable_prompt_embeds:
            raise ConfigurationError("prompts as embeddings have no tokens to go by: use the suffix method")
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._drafter: ServerDrafter | None = None
        self._known: dict[Key, list[Conversation]] = {}  # requests of the last step, by what they said so far
        self._lock = threading.Lock()
        if drafts_here(vllm_config):
            self._drafter = open_drafter(vllm_config, self._idle)

    def load_model(self, *_: object, **__: object) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: object
    ) -> list[list[int]]:
        """For each row; empty for rows whose prompt is not done."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._drafter is None:
            return drafts
        with self._lock:
            turns = self._recognise(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            chains = self._drafter.propose(list(turns.values()), steady=len(turns) == len(drafts))
        for row, chain in zip(turns, chains, strict=True):
            drafts[row] = chain
        return drafts

    def _recognise(self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any) -> dict[int, Turn]:
        """The turn of each row whose prompt is done. Requests without a row are over."""
        rows = [row for row, new in enumerate(sampled) if new]
        before = {row: int(lengths[row]) - len(sampled[row]) for row in rows}
        last, self._known = self._known, {}
        found = {row: _pop(last, _key(tokens[row], before[row])) for row in rows}
        self._end(last)
        turns = {row: self._turn(found[row], tokens[row], before[row], int(lengths[row])) for row in rows}
        for row, turn in turns.items():
            self._known.setdefault(_key(tokens[row], int(lengths[row])), []).append(turn.conversation)
        return turns

    def _turn(self, conversation: Conversation | None, tokens: Any, before: int, length: int) -> Turn:
        assert self._drafter is not None
        if conversation is None:
            conversation = self._drafter.begin(np.array(tokens[:before], dtype=np.int32))
        return turn_of(conversation, tokens, length, length - before, min(self._most, self._max_length - length - 1))

    def _end(self, known: dict[Key, list[Conversation]]) -> None:
        assert self._drafter is not None
        for conversations in known.values():
            for conversation in conversations:
                self._drafter.end(conversation)

    def _idle(self) -> None:
        """No step for a while: what was last said is complete, for all that is known."""
        with self._lock:
            last, self._known = self._known, {}
            self._end(last)


def _key(tokens: Any, length: int) -> Key:
    """What tells one request from another: how long it is, how it began, how it goes on."""
    return length, tokens[: min(length, DEPTH)].tobytes(), tokens[max(0, length - DEPTH) : length].tobytes()


def _pop(known: dict[Key, list[Conversation]], key: Key) -> Conversation | None:
    found = known.get(key)
    return found.pop() if found else None
