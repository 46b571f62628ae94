"""A request's interface to the cache: draft, extend, close; and the same for many requests in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.deletion import Decode
from agentspec.cache.index import (
    DEPTH,
    DraftJob,
    ExtendJob,
    IndexDrafter,
    Sourced,
    SuffixIndex,
    extend_batch,
    propose_batch,
)
from agentspec.cache.memory.sessions import TRANSCRIPT, Session
from agentspec.cache.partition import Partition
from agentspec.cache.pool import CachePool
from agentspec.cache.tokens import EMPTY, Tokens, TokensLike, as_tokens, require_budget, require_patience
from agentspec.errors import CacheClosedError, InvalidRequestError
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
            self.include(pool.join(partition, session, group, self._prompt_end).group.index, Source.SHARED)

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

    def include(self, index: SuffixIndex, source: int) -> None:
        """Draft from a further index too, say of a predicted output. It takes precedence over cached past outputs."""
        self.require_open()
        self._indexes.insert(len(self._indexes) - 1, (index, source))

    def draft(
        self,
        max_tokens: int = 32,
        min_probability: float = 0.0,
        *,
        chain: bool = False,
        behind: TokensLike = EMPTY,
        patience: float | None = None,
        counted: bool = True,
    ) -> Draft:
        """Propose a token tree that continues prompt and output; empty when nothing similar was seen.

        A `chain` has no branches, for targets that verify no trees. `behind` holds output tokens that `extend` will
        be given later; the tree continues after them. After `patience` seconds the tree is returned as far as it has
        grown; without `patience`, when it is whole. No draft waits for another thread. One that is not `counted` is
        in no statistics, for tokens `behind` that may never come.

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
        if counted:
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
            drafter, indexes, context, part, index, *_ = self.extension(committed[start : start + ROUND], learn)
            if drafter:
                drafter.learn(indexes, context, part)
            if index:
                index.add(TRANSCRIPT, part)
            self.extended(part)

    def extension(self, tokens: Tokens, learn: bool) -> ExtendJob:
        """The beginning of `extend` by at most ROUND tokens: returns what is to be done before `extended`."""
        self._leave_forgotten()
        self._count(tokens)
        session = None if self._session.forgotten else self._session.index
        return self.drafter if learn else None, self._indexes, self._context, tokens, session, TRANSCRIPT, EMPTY

    def extended(self, tokens: Tokens) -> None:
        """The end of `extend`, once what `extension` returned is done."""
        self._context = np.concatenate((self._context, tokens))[-DEPTH:]
        if self._session.membership:
            self._session.membership.append(tokens)
        self._output.append(tokens.copy())
        self._length += len(tokens)
        self.pool.measure(self.partition, self._session)

    def indexes_used(self) -> tuple[set[SuffixIndex], set[SuffixIndex]]:
        """The indexes that `extend` searches, and those that it adds to."""
        member = self._session.membership
        return {index for index, _ in self._indexes}, {self._session.index, *([member.group.index] if member else [])}

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Count a draft that the caller, with threads of its own, made from `drafter` and `indexes` directly."""
        self.pool.count(steps=1, drafted=drafted, accepted=accepted, hits=int(accepted > 0))

    def close(self, *, ended: bool = True) -> None:
        """Finish cleanly: the output joins the namespace's cached past outputs. Idempotent.

        Its last token is learned as one after which outputs end, unless it was cut, say by a limit: then not `ended`.
        """
        self.end(clean=True, ended=ended)

    def abandon(self) -> None:
        """Abort: the output so far is partial, so only this session keeps it. Idempotent."""
        self.end(clean=False)

    def end(self, *, clean: bool, ended: bool = True, settle: bool = True) -> None:
        """`close` or `abandon`. Without `settle` the caller looks after the budgets afterwards."""
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
            self.pool.release(self.partition, self._session, keep=self.store, settle=settle)

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
        self.end(clean=error is None)

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


Extension = tuple[CacheRequest, Tokens]


class BatchCalls:
    """The calls of a `SuffixCache` for many of its open requests. No other thread may use the requests meanwhile.

    All raise `InvalidRequestError` for a request of another cache and for lists of different lengths, and
    `CacheClosedError` where the cache is closed; nothing has changed then.
    """

    _pool: CachePool

    def draft_batch(
        self,
        requests: Sequence[CacheRequest],
        max_tokens: int | Sequence[int] | NDArray[np.integer] = 32,
        min_probability: float = 0.0,
        *,
        chain: bool = False,
        patience: float | None = None,
    ) -> list[Draft]:
        """Draft for each request as `request.draft` does, in one call that uses several threads where that is faster.

        `max_tokens` is one number for all requests, or one for each. After `patience` seconds all trees are returned
        as far as they have grown. Raises `InvalidRequestError` for a bad budget or patience too, and
        `CacheClosedError` where one of the requests is closed; no request has a new draft then.
        """
        requests = self._own(requests)
        asked = max_tokens.tolist() if isinstance(max_tokens, np.ndarray) else max_tokens
        budgets = list(asked) if isinstance(asked, Sequence) else [asked] * len(requests)
        _require_each(requests, len(budgets), "budgets", "max_tokens")
        require_patience(patience)
        jobs = [one.job(budget, min_probability, chain=chain) for one, budget in zip(requests, budgets, strict=True)]
        drafts = propose_batch(jobs, patience)
        for request, draft in zip(requests, drafts, strict=True):
            request.expect(draft)
        return drafts

    def extend_batch(
        self, requests: Sequence[CacheRequest], tokens: Sequence[TokensLike], *, learn: bool = True
    ) -> None:
        """Extend each request by the tokens at its place, as `request.extend` does one after the other.

        What the drafts before had right is looked up in several threads where that is faster. Raises
        `InvalidRequestError` for what are no token ids and for a request given twice, and `CacheClosedError` where one
        of the requests is closed; nothing has changed then.
        """
        requests = self._own(requests)
        if not hasattr(tokens, "__len__"):
            raise InvalidRequestError(f"tokens must be a list of token lists, not {tokens!r}", param="tokens")
        _require_each(requests, len(tokens), "lists of tokens", "tokens")
        if len({id(request) for request in requests}) < len(requests):
            raise InvalidRequestError("a request is given twice; join its tokens", param="requests")
        for request in requests:
            request.require_open()
        extensions = list(zip(requests, map(as_tokens, tokens), strict=True))
        for together in _lots(extensions):
            if len(together) == 1:
                together[0][0].extend(together[0][1], learn=learn)
            else:
                _extend(together, learn)

    def close_batch(self, requests: Sequence[CacheRequest]) -> None:
        """Close each request as `request.close` does, one after the other; budgets are looked after once for all.

        All are closed whatever fails, and a failure is raised then.
        """
        requests = self._own(requests)
        with contextlib.ExitStack() as settled:
            for partition in {request.partition: None for request in requests}:
                settled.callback(self._pool.namespaces.settle, partition)
            for request in reversed(requests):  # a stack: what was put there last is done first
                settled.callback(request.end, clean=True, settle=False)

    def _own(self, requests: Sequence[CacheRequest]) -> list[CacheRequest]:
        self._pool.require_open()
        own: list[CacheRequest] = list(requests) if isinstance(requests, Iterable) else [requests]
        if not all(isinstance(request, CacheRequest) for request in own):
            raise InvalidRequestError("requests must be open requests of this cache", param="requests")
        if any(request.pool is not self._pool for request in own):
            raise InvalidRequestError("requests must not be of another cache", param="requests")
        return own


def _require_each(requests: Sequence[CacheRequest], given: int, what: str, param: str) -> None:
    if given != len(requests):
        raise InvalidRequestError(f"{len(requests)} requests need as many {what}, not {given}", param=param)


def _lots(extensions: Iterable[Extension]) -> Iterator[list[Extension]]:
    """What can be done together, in order: what none searches that another adds to, and one round of each."""
    lot: list[Extension] = []
    searched: set[SuffixIndex] = set()
    written: set[SuffixIndex] = set()
    for request, tokens in extensions:
        reads, writes = request.indexes_used()
        if len(tokens) > ROUND or len(writes) > 1 or writes & searched or reads & written:
            if lot:
                yield lot
            lot, searched, written = [], set(), set()
        if len(tokens) > ROUND or len(writes) > 1:
            yield [(request, tokens)]
            continue
        lot.append((request, tokens))
        searched |= reads
        written |= writes
    if lot:
        yield lot


def _extend(extensions: Sequence[Extension], learn: bool) -> None:
    pairs = [pair for pair in extensions if len(pair[1])]
    jobs: list[ExtendJob] = [request.extension(tokens, learn) for request, tokens in pairs]
    extend_batch(jobs)
    for request, tokens in pairs:
        request.extended(tokens)
