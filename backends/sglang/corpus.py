"""Our replacement for SGLang's `NgramCorpus`: it drafts from the token cache, for all requests of a scheduler."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from agentspec.backends.engine_plugin.cache_router import forget
from agentspec.backends.engine_plugin.drafter import DraftTurn
from agentspec.backends.engine_plugin.request_state import (
    EMPTY_TREE,
    Ending,
    RequestInfo,
    RequestState,
    TokenTree,
    client_fields,
)
from agentspec.backends.engine_plugin.rounds import FailureLog
from agentspec.backends.sglang.drafting import Int64s, TreeDrafter, to_arrays
from agentspec.cache.index import DEPTH, Sourced, SuffixIndex
from agentspec.cache.tokens import Tokens
from agentspec.types import Source

logger = logging.getLogger(__name__)

SEPARATOR = -(2**31)
"""The token with which SGLang begins each document but the first."""
FORGET = re.compile(r"agentspec:(tenant|session)=(.+)", re.DOTALL)
"""The names of external texts that stand for what the cache of this process holds of a tenant or session."""
_RANKS = re.compile(r"(^|\|)elastic_ep_size=\d+$")  # that SGLang adds to every `extra_key` where it may change


class ExternalTexts:
    """SGLang's external corpora: texts that an operator gives a running server to draft from, in one index, bounded by
    `most` tokens. A text counts against the bound once it is committed.

    One thread at a time loads; others may draft, commit, remove and list meanwhile.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._index = SuffixIndex()
        self._numbers = count()
        self._sequences: dict[str, list[int]] = {}
        self._committed: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def sourced(self) -> Sourced:
        return self._index, Source.SHARED

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        """Draft from a text for every request, whoever sent it; returns its tokens. It is added whole or not at all.

        Raises `ValueError` for one too many or too long.
        """
        if FORGET.fullmatch(corpus_id):
            raise ValueError(f"External corpus {corpus_id!r}: that name only forgets, when it is removed: use another")
        if corpus_id in self._sequences:
            raise ValueError(f"External corpus {corpus_id!r} already exists: remove it first")
        documents, loaded, room = [list[int]()], 0, self._most - sum(self.list_external_corpora().values())
        for chunk in chunks:
            loaded += len(chunk)
            if loaded > room:
                raise ValueError(f"External corpus {corpus_id!r} exceeds the {room} tokens that there is room for")
            for token in chunk:
                if token == SEPARATOR:
                    documents.append([])
                else:
                    documents[-1].append(token)
        if not any(documents):
            raise ValueError(f"External corpus {corpus_id!r} holds no tokens")
        self._sequences[corpus_id] = [self._add(document) for document in documents if document]
        return loaded

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        with self._lock:
            self._committed[corpus_id] = loaded_token_count

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Remove a text, or what one of the names in `FORGET` means. No name is an error, as in SGLang."""
        if found := FORGET.fullmatch(corpus_id):
            forget(**{found[1]: found[2]})
        with self._lock:
            self._committed.pop(corpus_id, None)
        if numbers := self._sequences.pop(corpus_id, None):
            self._index.remove(np.array(numbers, dtype=np.int64))

    def list_external_corpora(self) -> dict[str, int]:
        """Tokens of each committed text."""
        with self._lock:
            return dict(self._committed)

    def _add(self, document: Sequence[int]) -> int:
        number = next(self._numbers)
        self._index.append(number, np.array(document, dtype=np.int32))
        return number


class _Live:
    """A request of the scheduler that has been in a decoding batch, and how far its text has been read."""

    def __init__(self, req: Any, state: RequestState) -> None:
        self._req = weakref.ref(req)  # SGLang may drop a request without a word
        self.state = state
        self.prompt_length = len(req.origin_input_ids_unpadded)
        self.prompt_end = list(req.origin_input_ids_unpadded[-DEPTH:])
        self.recorded = 0  # tokens of output
        self.seen = self.prompt_length  # tokens of prompt and output

    @property
    def req(self) -> Any:
        """SGLang's request; None once it is gone."""
        return self._req()


class TokenCacheCorpus(ExternalTexts):
    """Takes the place of `sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus` in SGLang's NGRAM worker.

    The worker tells it of its requests by `see` and `finish`. Only the first rank of a group drafts; all ranks call
    `batch_get` for the same requests and get the same trees, since drafts depend on timing. What fails costs drafts
    and is logged once; only what concerns external texts raises errors.
    """

    def __init__(
        self,
        drafter: Callable[..., TreeDrafter] | None,
        group: Any,
        *,
        draft_token_num: int,
        external_corpus_max_tokens: int,
        adapter_path: Callable[[str], str] = lambda adapter: "",
        **_: Any,
    ) -> None:
        """`drafter` makes the drafter with these texts as `shared`; None where another rank drafts. `group` is SGLang's
        `GroupCoordinator`. `draft_token_num` counts the last token of the context too; of SGLang's other options none
        has an effect.
        """
        super().__init__(external_corpus_max_tokens)
        self.draft_token_num = draft_token_num
        self._group, self._adapter_path = group, adapter_path
        self._live: dict[str, _Live] = {}
        self._failures = FailureLog(logger, "a request goes without drafts")
        self._drafter = drafter and drafter(shared=[self.sourced])

    def see(self, reqs: Iterable[Any]) -> None:
        """Begin those of a batch's requests that are new, and record the output that SGLang has processed so far."""
        if self._drafter is None:
            return
        for req in reqs:
            with self._failures.caught():
                live = self._live.get(req.rid)
                if live is None or live.req is not req:
                    self._begin(req)
                else:
                    self._record(live, req.output_ids)

    def recorded_later(self) -> AbstractContextManager[None]:
        """What is seen within is recorded at the end, after the drafts are made."""
        return nullcontext() if self._drafter is None else self._drafter.recorded_later()

    def finish(self, rid: str) -> None:
        """End a request and keep its output up to where it stopped; one that is gone or aborted keeps nothing."""
        live = self._live.pop(rid, None)
        if live is None or self._drafter is None:
            return
        ending = Ending.ABORTED
        with self._failures.caught():
            if live.req is not None and live.req.finished():
                self._record(live, live.req.output_ids_through_stop)
                ending = _ending(live.req.finished_reason.to_json(), live.recorded)
        self._drafter.end(live.state, ending)

    def close(self) -> None:
        if self._drafter is not None:
            self._drafter.close()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything so far is recorded; false if that took longer than `timeout` seconds."""
        return self._drafter is None or self._drafter.flush(timeout)

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[Int64s, Int64s]:
        """Trees for requests, by their last tokens and the length of all their text. Shapes as in `to_arrays`."""
        trees = self._draft(req_ids, batch_tokens, total_lens)
        if self._group.world_size > 1:
            trees = self._group.broadcast_object(trees, src=0)
        return to_arrays([tokens[-1] for tokens in batch_tokens], trees, self.draft_token_num)

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Does nothing: `see` and `finish` record whole outputs."""

    def synchronize(self) -> None:
        """Does nothing: drafting does not wait for the recording of outputs."""

    def erase_match_state(self, req_ids: Sequence[str]) -> None:
        """End requests that are over; one that left the batch because memory ran short comes again."""
        over = [rid for rid, live in self._live.items() if live.req is None]
        over += [rid for rid in req_ids if (live := self._live.get(rid)) and live.req and live.req.finished()]
        for rid in over:
            self.finish(rid)

    def reset(self) -> None:
        """Aborts all requests. What the cache learned stays: `agentspec cache forget` deletes it."""
        for rid in list(self._live):
            self.finish(rid)

    def _begin(self, req: Any) -> None:
        if self._drafter is None or req.input_embeds is not None:
            return  # a prompt without token ids
        if (before := self._live.pop(req.rid, None)) is not None:
            self._drafter.end(before.state, Ending.ABORTED)
        prompt = np.array(req.origin_input_ids_unpadded, dtype=np.int32)
        live = self._live[req.rid] = _Live(req, self._drafter.begin_state(prompt, self._info(req)))
        self._record(live, req.output_ids)

    def _info(self, req: Any) -> RequestInfo:
        info = request_info(req)
        return replace(info, adapter_path=self._adapter_path(info.adapter)) if info.adapter else info

    def _record(self, live: _Live, output: Sequence[int]) -> None:
        if self._drafter is not None and len(output) > live.recorded:
            self._drafter.record(live.state, np.array(output[live.recorded :], dtype=np.int32))
            live.recorded = len(output)

    def _draft(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> list[TokenTree]:
        if self._drafter is None:
            return []
        turns: dict[int, DraftTurn] = {}
        for row, (rid, tail, total) in enumerate(zip(req_ids, batch_tokens, total_lens, strict=True)):
            if (live := self._live.get(rid)) is not None:
                with self._failures.caught():
                    turns[row] = _turn(live, tail, total, self.draft_token_num - 1)
        drafted = self._drafter.propose(list(turns.values())) if turns else []
        found = dict(zip(turns, drafted, strict=True))
        return [found.get(row, EMPTY_TREE) for row in range(len(req_ids))]


def _turn(live: _Live, tail: Sequence[int], total: int, limit: int) -> DraftTurn:
    """The draft turn of a request with `total` tokens, of which `tail` are the last.

    Under overlap scheduling the last accepted tokens are in `tail` only, not yet in the request's output.
    """
    output = live.req.output_ids
    pending = total - live.prompt_length - len(output)
    if 0 <= pending <= len(tail):
        known = [*live.prompt_end, *output[-DEPTH:]][-DEPTH:]
        context = [*known, *(tail[-pending:] if pending else ())][-DEPTH:]
    else:
        context = list(tail)
    fresh = max(0, total - live.seen)
    live.seen = max(live.seen, total)
    new = context[-fresh:] if 0 < fresh <= len(context) else []
    return DraftTurn(live.state, _int32(new), _int32(context), limit)


def _int32(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def request_info(req: Any) -> RequestInfo:
    """What the drafter needs to know of SGLang's `Req`: labels, salt, adapter and prediction."""
    given = req.sampling_params.custom_params
    custom = given if isinstance(given, dict) else {}
    sent = client_fields(custom)
    labels = sent["labels"]
    session = labels.session or req.session_id or (req.session.session_id if req.session is not None else None)
    sent["labels"] = replace(labels, session=session)
    return RequestInfo(salt=_salt(req), adapter=req.lora_id or "", **sent)


def _ending(reason: Mapping[str, Any], tokens: int) -> Ending:
    """How an output of so many tokens ended, by SGLang's description of it: at a token (by its id), at a text, ..."""
    if reason["type"] == "abort":
        return Ending.ABORTED
    return Ending.STOPPED if isinstance(reason.get("matched"), int) else Ending.cut(tokens)


def _salt(req: Any) -> str | None:
    """What keeps a request's text apart: its `cache_salt` or `extra_key`; both together are a salt of their own."""
    # SGLang appends the adapter, then the number of ranks of elastic expert parallelism.
    key = _RANKS.sub("", req.extra_key or "").removesuffix(req.lora_id or "")
    given = [salt for salt in (req.cache_salt, key) if salt]
    return "\0".join(dict.fromkeys(given)) if given else None
