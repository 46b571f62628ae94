"""An SGLang scheduler in miniature: requests that generate given texts, verified by the trees that a worker drafts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.backends.sglang.corpus import TokenCacheCorpus
from agentspec.backends.sglang.drafting import TreeDrafter
from agentspec.cache import SuffixCache
from tests.backends.conftest import opening

VOCABULARY, NODES = 1000, 8


class Req:
    """The part of SGLang's `Req` that is read; `answer` is what the model generates."""

    def __init__(self, rid: str, prompt: Sequence[int], answer: Sequence[int], **more: Any) -> None:
        self.rid, self.answer = rid, list(answer)
        self.origin_input_ids_unpadded, self.output_ids = array("q", prompt), array("q")
        self.input_embeds = self.session = self.session_id = self.cache_salt = self.extra_key = self.lora_id = None
        self.sampling_params = SimpleNamespace(custom_params=None)
        self.finished_len: int | None = None
        vars(self).update(more)

    @property
    def output_ids_through_stop(self) -> array[int]:
        return self.output_ids[: self.finished_len]

    def finished(self) -> bool:
        return self.finished_len is not None

    def take(self, tokens: Sequence[int]) -> None:
        self.output_ids.extend(tokens)
        if len(self.output_ids) >= len(self.answer):
            self.finish(len(self.answer))

    def finish(self, length: int, **reason: Any) -> None:
        self.finished_len = length
        described = {"type": "length", **reason}
        self.finished_reason = SimpleNamespace(to_json=lambda: described)


def parents_of(mask: np.ndarray) -> list[int]:
    """Each node's parent by the ancestor mask; -1 for node 0."""
    return [max((j for j in range(i) if mask[i, j]), default=-1) for i in range(len(mask))]


def verified(tokens: Sequence[int], parents: Sequence[int], following: Sequence[int]) -> int:
    """How many of the tokens that follow the tree holds as a path below node 0."""
    at = count = 0
    for token in following:
        found = [i for i in range(1, len(tokens)) if parents[i] == at and tokens[i] == token]
        if not found:
            break
        at, count = found[0], count + 1
    return count


class Scheduler:
    """Runs a worker as SGLang does: with overlap, a step is drafted before the last one's result is processed."""

    def __init__(self, worker: Any, *, overlap: bool) -> None:
        self.worker, self.overlap = worker, overlap
        self.steps = 0
        self._waiting: list[tuple[Req, list[int]]] = []

    def run(self, *reqs: Req) -> None:
        """Generate all answers side by side. The first token is the prefill's."""
        running = list(reqs)
        accepted = {req.rid: [req.answer[0]] for req in running}
        for req in running:
            if not self.overlap:
                req.take(accepted[req.rid])
        self._waiting = [(req, accepted[req.rid]) for req in running] if self.overlap else []
        while running:
            accepted = self._step(running, accepted)
            done, self._waiting = self._waiting, [(req, accepted[req.rid]) for req in running]
            if not self.overlap:
                done, self._waiting = self._waiting, []
            self._process(done)
            left = [req for req in running if not req.finished()]
            if len(left) < len(running):
                self.worker.ngram_corpus.erase_match_state([req.rid for req in running if req not in left])
            running = left

    def _step(self, running: list[Req], accepted: dict[str, list[int]]) -> dict[str, list[int]]:
        padded = [(accepted[req.rid] + [0] * NODES)[:NODES] for req in running]
        batch = SimpleNamespace(
            reqs=running,
            grammar_needs_sync=lambda: False,
            spec_info=SimpleNamespace(
                accept_tokens=_Tensor(token for row in padded for token in row),
                accept_lens=_Tensor([len(accepted[req.rid]) for req in running]),
            ),
        )
        tokens, mask = self.worker._prepare_draft_tokens(batch)
        assert tokens.dtype == mask.dtype == np.int64
        tokens, mask = tokens.reshape(len(running), NODES), mask.reshape(len(running), NODES, NODES)
        self.steps += 1
        found = {}
        for row, req in enumerate(running):
            at = len(req.output_ids) + (len(accepted[req.rid]) if self.overlap else 0)
            following = [*req.answer, *[VOCABULARY - 1] * 3 * NODES][at:]
            count = verified(tokens[row].tolist(), parents_of(mask[row]), following)
            found[req.rid] = following[: count + 1]
        return found

    def _process(self, results: list[tuple[Req, list[int]]]) -> None:
        for req, tokens in results:
            if not req.finished():
                req.take(tokens)
                if req.finished():
                    self.worker.note_request_finished(rid=req.rid, natural_stop=True)


class _Tensor(list[int]):
    is_cpu = True

    def tolist(self) -> list[int]:
        return list(self)


class NGRAMWorker:
    """SGLang's worker as far as drafting goes, in a few lines; test_contract.py runs the released one."""

    def __init__(self, corpus: TokenCacheCorpus, *, overlap: bool) -> None:
        self.ngram_corpus, self.overlap = corpus, overlap

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        self.ngram_corpus.see(batch.reqs)
        tails, totals = [], []
        tokens, lengths = batch.spec_info.accept_tokens, batch.spec_info.accept_lens
        for row, req in enumerate(batch.reqs):
            pending = tokens[row * NODES : row * NODES + lengths[row]] if self.overlap else []
            text = [*req.origin_input_ids_unpadded, *req.output_ids, *pending]
            tails.append(text[-18:])
            totals.append(len(text))
        self.ngram_corpus.synchronize()
        return self.ngram_corpus.batch_get([req.rid for req in batch.reqs], tails, totals)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self.ngram_corpus.finish(rid)


ALONE = SimpleNamespace(world_size=1, rank_in_group=0)
Corpora = Callable[..., TokenCacheCorpus]


@pytest.fixture
def cache() -> Iterator[SuffixCache]:
    with SuffixCache.open() as cache:
        yield cache


@pytest.fixture
def corpora(cache: SuffixCache, patient: None) -> Iterator[Corpora]:
    """Makes corpora on one cache. They wait until each batch that they see is recorded, and no search gives up."""
    made: list[TokenCacheCorpus] = []
    opened = opening(cache, pepper="acme")

    class Flushed(TokenCacheCorpus):
        def see(self, reqs: Any) -> None:
            super().see(reqs)
            assert self.flush()

    def make(group: Any = ALONE, *, here: bool = True, most: int = 1000) -> TokenCacheCorpus:
        drafter = partial(TreeDrafter, opened, VOCABULARY, on_close=lambda hung: None) if here else None
        made.append(Flushed(drafter, group, draft_token_num=NODES, external_corpus_max_tokens=most))
        return made[-1]

    yield make
    for corpus in made:
        corpus.close()
