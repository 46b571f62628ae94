"""Drafts for all requests of a server, once per engine step (a round): chains in vLLM's first runner, trees in SGLang.
Independent of the engines' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import mul
from time import perf_counter
from typing import NamedTuple

from agentspec.backends.engine_plugin.recorder import PATIENCE, Open, OutputUpdate, RecordingDrafter
from agentspec.backends.engine_plugin.request_state import (
    EMPTY_TREE,
    Deletions,
    Ending,
    FoundTree,
    RequestState,
    TokenTree,
)
from agentspec.backends.engine_plugin.rounds import metric
from agentspec.cache.index import DraftJob, Sourced, propose_batch
from agentspec.cache.tokens import MOST_TOKEN, Tokens
from agentspec.types import Draft, path_length

READING_ROWS = 312
"""Tokens that take as long to compute as all else in a step: on an H200, 8B in bfloat16, 64 take 7.82 ms, one 6.51."""
RATE = 0.25  # how fast the goodput is followed
TOGETHER = 16  # rounds within which requests begin together
AHEAD = 4  # tokens
LEAST_SHARE = 1 / 8

_Search = tuple[RequestState, int, DraftJob]
"""For a request, when it had so many tokens."""


class DraftTurn(NamedTuple):
    """A request's part in a round: its new tokens `fresh`, its last tokens `context`, and the draft's length limit.

    `context` is int32; only its last `DEPTH` tokens matter, and it is read during the call only.
    """

    state: RequestState
    fresh: Tokens
    context: Tokens
    limit: int


class Goodput:
    """The tokens that recent rounds gained for the cost of one: a token that is less likely makes a batch slower."""

    def __init__(self) -> None:
        self._value = 0.0

    def follow(self, gained: Sequence[int], drafted: int, shares: Sequence[float]) -> None:
        """A round gained so many tokens for each request, and had verified so many drafted ones in all."""
        counted = sum(map(mul, gained, shares))
        self._value += RATE * (counted / (READING_ROWS + len(gained) + drafted) - self._value)

    def least(self, share: float) -> float:
        """The least probability with which a token pays for a request whose tokens count so much."""
        return self._value / share


def shares(lengths: Sequence[int], rounds: Sequence[int]) -> list[float]:
    """What a token of each request counts, by the tokens that it has written and the rounds in which it did.

    Requests that began together are waited for together, as a trainer's samples are: the slowest one decides. A token
    counts half as much for every `AHEAD` tokens that its request is ahead of that one, but at least `LEAST_SHARE`:
    others may wait for each of them, and likely text is drafted in any case.
    """
    if max(rounds) - min(rounds) > TOGETHER:
        return [1.0] * len(lengths)
    slowest = min(lengths)
    return [max(LEAST_SHARE, 0.5 ** ((length - slowest) / AHEAD)) for length in lengths]


class ServerDrafter(RecordingDrafter):
    """Drafts chains or trees of tokens for the requests of a server."""

    def __init__(
        self,
        open_cache: Open,
        vocabulary: int,
        *,
        chains: bool = False,
        least: float = 0.0,
        shared: Sequence[Sourced] = (),
        on_close: Callable[[bool], None] = lambda hung: None,
    ) -> None:
        """A draft ends where the probability that it is accepted so far falls below `least`, and chains, of which each
        token costs, where it does so below the `Goodput` of recent rounds. `shared` are indexes that every request is
        drafted from in addition to its own.
        """
        super().__init__(open_cache, vocabulary, on_close=on_close)
        self._thread = ThreadPoolExecutor(1, "agentspec-search")
        self._late: Future[None] = self._thread.submit(lambda: None)
        self._chains, self._least, self._shared = chains, least, shared
        self._goodput = Goodput()
        self._first = 0  # of the rows that are searched for

    def record(self, state: RequestState, fresh: Tokens) -> None:
        """Record new output tokens of a request for which no draft is needed."""
        self._recorder.extend([self._update(state, fresh)])

    def end(self, state: RequestState, ending: Ending | None = None) -> None:
        """End a request and store its output, unless it was aborted; without `ending`, as its tokens say."""
        self._recorder.end(state, ending or state.ending)

    def propose(self, turns: Sequence[DraftTurn]) -> list[TokenTree]:
        """A draft for each request."""
        started = perf_counter()
        updates: list[OutputUpdate] = []
        try:
            updates = [self._update(turn.state, turn.fresh) for turn in turns]
            trees = self._search(turns, self._leasts(updates))
        except Exception as error:
            self._failures.report(error)
            trees = [EMPTY_TREE for _ in turns]
        self._recorder.extend(updates)  # last: the recorder's thread would compete with the search
        for turn, tree in zip(turns, trees, strict=True):
            turn.state.tree = tree
        metric("seconds").inc(perf_counter() - started)
        metric("empty_rows").inc(sum(not tree.tokens for tree in trees))
        return trees

    def _update(self, state: RequestState, fresh: Tokens) -> OutputUpdate:
        """Follow new tokens, and count those that were drafted."""
        tree, state.tree = state.tree, EMPTY_TREE
        accepted = path_length(*tree, fresh.tolist()) if tree.tokens else 0
        state.rounds += 1
        return OutputUpdate(state, state.advance(fresh), len(tree.tokens), accepted, state.source)

    def _leasts(self, updates: Sequence[OutputUpdate]) -> list[float]:
        """For each request the least probability with which a token is drafted."""
        if not self._chains or not updates:
            return [self._least] * len(updates)
        states = [update.state for update in updates]
        counted = shares([state.output_length for state in states], [state.rounds for state in states])
        gained = [len(update.tokens) for update in updates]
        self._goodput.follow(gained, sum(update.drafted for update in updates), counted)
        return [max(self._least, self._goodput.least(share)) for share in counted]

    def _search(self, turns: Sequence[DraftTurn], leasts: Sequence[float]) -> list[TokenTree]:
        """Search for all rows with one deadline, beginning behind the last row that had time in the round before."""
        trees, asked, ahead = self._asked(turns, leasts)
        first = self._first % max(1, len(asked))
        asked = asked[first:] + asked[:first]
        deletions, until = Deletions.count, perf_counter() + PATIENCE
        drafts = propose_batch([job for _, job in asked], PATIENCE) if asked else []
        late, done = perf_counter() >= until, 0
        for (row, job), draft in zip(asked, drafts, strict=True):
            turn, found = turns[row], _tree(draft)
            short = late and len(found.tokens) < turn.limit
            known = EMPTY_TREE if not short else chain(_left(turn)[: turn.limit]) if self._chains else _subtree(turn)
            done += not late or len(found.tokens) > 0
            if missed := short and len(known.tokens) >= len(found.tokens):
                trees[row] = known
            else:
                turn.state.found, trees[row] = FoundTree(found, turn.state.length, deletions), found
            if missed or (self._chains and len(found.tokens) == turn.limit):
                ahead.append(_ahead(turn, job))
        self._first = first + done
        metric("searches", "done").inc(done)
        metric("searches", "missed").inc(len(asked) - done)
        if ahead and self._late.done():
            self._late = self._thread.submit(self._search_ahead, ahead, deletions)
        return [within(tree, self._vocabulary) for tree in trees]

    def _asked(
        self, turns: Sequence[DraftTurn], leasts: Sequence[float]
    ) -> tuple[list[TokenTree], list[tuple[int, DraftJob]], list[_Search]]:
        """What is known to follow, the rows that are searched for, and what the next round may need in addition."""
        trees, asked, ahead = list[TokenTree](), list[tuple[int, DraftJob]](), list[_Search]()
        for row, (turn, least) in enumerate(zip(turns, leasts, strict=True)):
            state, limit = turn.state, turn.limit
            predicted = state.from_prediction(limit, least)
            state.source = "prediction" if predicted else "cache"
            left = _left(turn) if self._chains and state.drafts and not predicted else []
            whole = len(left) >= limit
            trees.append(chain(predicted or left[:limit]) if predicted or whole else EMPTY_TREE)
            if not predicted and len(left) <= 2 * limit and (job := self._job(turn, least)) is not None:
                ahead.append(_ahead(turn, job)) if whole else asked.append((row, job))
        return trees, asked, ahead

    def _search_ahead(self, searches: Sequence[_Search], deletions: int) -> None:
        """Search, while the engine's step runs, for what had no time in a round and for what comes after its chains."""
        with self._failures.caught():
            drafts = propose_batch([job for _, _, job in searches])
            for (state, length, _), draft in zip(searches, drafts, strict=True):
                state.found = FoundTree(_tree(draft), length, deletions)

    def flush(self, timeout: float = 10.0) -> bool:
        wait([self._late], timeout)
        return super().flush(timeout)

    def close(self) -> None:
        """Record everything so far, then stop. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _job(self, turn: DraftTurn, least: float) -> DraftJob | None:
        """The search for a request; None if its cache is not open, or no drafts are made for it."""
        state, cache = turn.state, turn.state.cache  # the recorder may take it away meanwhile
        if cache is None or not state.drafts or turn.limit <= 0:
            return None
        return cache.drafter, [*state.indexes, *self._shared], turn.context, turn.limit, least, self._chains


def _ahead(turn: DraftTurn, job: DraftJob) -> _Search:
    """The search for what follows until the round after the next, if all drafts are right: three, each with a `least`
    probability of its own.
    """
    drafter, indexes, context, limit, least, chains = job
    return turn.state, turn.state.length, (drafter, indexes, context.copy(), 3 * limit + 2, least**3, chains)


def chain(tokens: Sequence[int]) -> TokenTree:
    return TokenTree(list(tokens), list(range(-1, len(tokens) - 1)))


def _tree(draft: Draft) -> TokenTree:
    return TokenTree(draft.tokens.tolist(), draft.parents.tolist())


def _came(turn: DraftTurn, found: FoundTree) -> list[int] | None:
    """The tokens that came since something was found; None if that must not be drafted from any more."""
    since = turn.state.length - found.length
    if found.deletions != Deletions.count or not 0 <= since <= len(turn.context):
        return None
    came: list[int] = turn.context[len(turn.context) - since :].tolist()
    return came


def _left(turn: DraftTurn) -> list[int]:
    """What is left of the chain last found, behind the tokens that came since; empty if these are not its first."""
    found = turn.state.found  # another may take its place meanwhile
    tokens, came = found.tree.tokens, _came(turn, found)
    return tokens[len(came) :] if came is not None and tokens[: len(came)] == came else []


def _subtree(turn: DraftTurn) -> TokenTree:
    """The same of a tree."""
    found = turn.state.found
    edges, node = {edge: child for child, edge in enumerate(zip(*found.tree, strict=True))}, -1
    if (came := _came(turn, found)) is None:
        return EMPTY_TREE
    for token in came:
        if (node := edges.get((token, node), len(edges))) == len(edges):
            return EMPTY_TREE
    left = within(found.tree, MOST_TOKEN + 1, node)
    return TokenTree(left.tokens[: turn.limit], left.parents[: turn.limit])


def within(tree: TokenTree, vocabulary: int, root: int = -1) -> TokenTree:
    """What follows `root` in the tree, without nodes whose token, or that of one above, is not in the vocabulary."""
    if root < 0 and max(tree.tokens, default=0) < vocabulary:
        return tree
    kept: dict[int, int] = {root: -1}
    tokens, parents = list[int](), list[int]()
    for node, (token, parent) in enumerate(zip(*tree, strict=True)):
        if token < vocabulary and parent in kept:
            kept[node] = len(tokens)
            tokens.append(token)
            parents.append(kept[parent])
    return TokenTree(tokens, parents)
