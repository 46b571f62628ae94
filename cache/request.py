"""A request's interface to the cache: draft, extend, close."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn

import numpy as np

from agentspec.cache.deletion import Decode
from agentspec.cache.index import DEPTH, DraftJob, IndexDrafter, Sourced, propose_batch
from agentspec.cache.memory.sessions import TRANSCRIPT, Session
from agentspec.cache.partition import Partition
from agentspec.cache.pool import CachePool
from agentspec.cache.tokens import EMPTY, Tokens, TokensLike, as_tokens, require_budget, require_patience
from agentspec.errors import CacheClosedError
from agentspec.types import Draft, Labels, Source, path_length

ROUND = 32
"""Tokens that the drafter learns from at a time, before the session's index gets them."""


class CacheRequest:
    """An open request. Leaving the `with` block without an exception closes it and shares its output.

    One thread at a time may use it; different requests of one cache may run in different threads. The caller acquired
    `session` from `pool`; the request releases it at its end.
    """

    def __init__(
        self,
        pool: CachePool,
        partition: Partition,
        session: Session,
        prompt: Tokens,
        labels: Labels,
        *,
        store: bool,
        decode: Decode | None = None,
        group: str | None = None,
        share: bool = True,
    ) -> None:
        self.pool = pool
        self.labels = labels
        self.store = store
        self.share = share
        self._decode = decode
        self.partition = partition
        self._session = session
        self._prompt_end = prompt[-DEPTH:].copy()
        self._context = self._prompt_end
        self._output: list[Tokens] = []
        self._length = 0  # of the output
        self._drafts: dict[int, Draft] = {}  # drafts not counted yet, by the place in the output where they begin
        self._open = True
        self._indexes: list[Sourced] = [(session.index, Source.SESSION), (partition.shared, Source.SHARED)]
        self._group = group
        if group is not None:
            member = pool.join(partition, session, group, self._prompt_end)
            self._indexes.insert(1, (member.group.index, Source.SHARED))

    @property
    def context(self) -> Tokens:
        """The last `DEPTH` tokens of prompt and output."""
        return self._context

    @property
    def output(self) -> Tokens:
        """Every token extended so far."""
        return np.concatenate(self._output) if self._output else EMPTY

    @property
    def drafter(self) -> IndexDrafter:
        return self.partition.drafter

    @property
    def indexes(self) -> list[Sourced]:
        """The indexes that this request drafts from; at equal match length an earlier index takes precedence."""
        self._leave_forgotten()
        return list(self._indexes)

    def draft(
        self,
        max_tokens: int = 32,
        min_probability: float = 0.0,
        *,
        chain: bool = False,
        behind: TokensLike = EMPTY,
        patience: float | None = None,
    ) -> Draft:
        """Propose a token tree that continues prompt and output; empty when nothing similar was seen.

        A `chain` has no branches, for targets that verify no trees. `behind` holds output tokens that `extend` will
        be given later; the tree continues after them. After `patience` seconds the tree is returned as far as it has
        grown; without `patience`, when it is whole. No draft waits for another thread.

        Raises `InvalidRequestError` for a bad budget, `CacheClosedError` after the request or the cache was closed.
        """
        drafter, indexes, context, *_, chain = self.job(max_tokens, min_probability, chain=chain)
        if behind is not EMPTY:
            behind = as_tokens(behind, "behind")
            context = np.concatenate((context, behind))
        require_patience(patience)
        if patience is None:
            draft = drafter.propose(indexes, context, max_tokens, min_probability, chain)
        else:
            [draft] = propose_batch([(drafter, indexes, context, max_tokens, min_probability, chain)], patience)
        self.expect(draft, len(behind))
        return draft

    def job(self, max_tokens: int, min_probability: float = 0.0, *, chain: bool = False) -> DraftJob:
        """The arguments of a draft, for `propose_batch`. Raises as `draft`."""
        self.require_open()
        require_budget(max_tokens, min_probability)
        self._leave_forgotten()
        return self.drafter, self._indexes, self._context, max_tokens, min_probability, bool(chain)

    def expect(self, draft: Draft, behind: int = 0) -> None:
        """Register a draft that begins `behind` tokens after the output so far; `extend` counts its accepted tokens."""
        self._drafts[self._length + behind] = draft

    def extend(self, tokens: TokensLike, *, learn: bool = True) -> None:
        """Record the tokens committed in this step, the target's own included. The session drafts from them at once.

        Without `learn` drafts are not judged by these tokens, say because they were when another request got them.
        Raises `InvalidRequestError` unless `tokens` are token ids, `CacheClosedError` after close.
        """
        self.require_open()
        committed = as_tokens(tokens)
        if len(committed) > ROUND:
            self._count(committed)
        for start in range(0, len(committed), ROUND):
            self._extend(committed[start : start + ROUND], learn)

    def _extend(self, tokens: Tokens, learn: bool) -> None:
        """`extend` by at most ROUND tokens."""
        self._leave_forgotten()
        self._count(tokens)
        if learn:
            self.drafter.learn(self._indexes, self._context, tokens)
        if not self._session.forgotten:
            self._session.index.add(TRANSCRIPT, tokens)
        self._context = np.concatenate((self._context, tokens))[-DEPTH:]
        if self._session.membership:
            self._session.membership.append(tokens)
        self._output.append(tokens.copy())
        self._length += len(tokens)
        self.pool.measure(self.partition, self._session)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Count a draft that the caller, with threads of its own, made from `drafter` and `indexes` directly."""
        self.pool.count(steps=1, drafted=drafted, accepted=accepted, hits=int(accepted > 0))

    def close(self, *, ended: bool = True) -> None:
        """Finish cleanly: the output joins the namespace's cached past outputs. Idempotent.

        Its last token is learned as one after which outputs end, unless it was cut, say by a limit: then not `ended`.
        """
        self._end(clean=True, ended=ended)

    def abandon(self) -> None:
        """Abort: the output so far is partial, so only this session keeps it. Idempotent."""
        self._end(clean=False)

    def _end(self, *, clean: bool, ended: bool = True) -> None:
        if not self._open:
            return
        self._open = False
        if self.pool.closed:
            return
        try:
            if self._group is not None:
                self.pool.leave(self.partition, self._session, self._group, keep=clean)
            if self.store:
                if not clean:
                    self.pool.count(partial=1)
                elif self._output and self.share:
                    self.pool.add_output(
                        self.partition,
                        self._session,
                        self.labels,
                        self.output,
                        self._prompt_end,
                        self._decode,
                        ended=ended,
                    )
        finally:
            self.pool.release(self.partition, self._session, keep=self.store)

    def _leave_forgotten(self) -> None:
        """Stop drafting from the session's own text if the session was deleted meanwhile."""
        if self._session.forgotten:
            self._indexes = [pair for pair in self._indexes if pair[0] is not self._session.index]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a CacheRequest cannot be pickled or copied: it belongs to the cache that began it")

    def __enter__(self) -> CacheRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(clean=error is None)

    def require_open(self) -> None:
        if not self._open:
            raise CacheClosedError("this cache request is closed")
        self.pool.require_open()

    def _count(self, committed: Tokens) -> None:
        """Count how many of the committed tokens each registered draft that begins among them had right."""
        end = self._length + len(committed)
        for start in [start for start in self._drafts if start < end]:
            draft = self._drafts.pop(start)
            output = committed[start - self._length :].tolist()
            self.count_draft(len(draft), path_length(draft.tokens.tolist(), draft.parents.tolist(), output))
