"""The suffix index and the drafter in plain Python: they compute the same as `cache/native`, without its speed.

Read this first. The tests require the native code to return the same counts, successors and drafts. Every query looks
at every token, so this module serves only to explain and to test.

The *context* of a token is the tokens before it, read backwards. Two contexts match over p tokens when their nearest p
tokens are equal. Drafting asks, for the longest match lengths first, which tokens followed contexts like this one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from agentspec.types import Source

DEPTH = 64
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 24, 64)
RECENCY_BONUS = 1.0
NEGLIGIBLE = 1e-4
PRIOR_TRIES, PRIOR_TOTAL, MEMORY = 6.0, 1.5, 100
WORTH = 0.35
EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1.0)
NEUTRAL_TRIES = 10.0
END_TOKENS = 64
COMMON_TOKENS, RARE = 600, 2**31 - 2
SHAPE_DEPTH = 8
SHAPES = 3  # what levels of shapes are rated as
RANKS = [(shapes, length) for shapes in (True, False) for length in LENGTHS]  # the last are looked at first


@dataclass(frozen=True)
class Occurrence:
    """One occurrence of `token` after the context `before`; later occurrences have a higher `time`."""

    sequence: int
    time: int
    before: tuple[int, ...]
    token: int

    def shares(self, context: Sequence[int]) -> int:
        """How many of the nearest tokens of `context` match."""
        shared = 0
        for mine, theirs in zip(reversed(self.before), reversed(context[-DEPTH:]), strict=False):
            if mine != theirs:
                break
            shared += 1
        return shared


@dataclass
class ReferenceIndex:
    """Sequences of tokens; `prefixes` holds the tokens before each sequence, which are matched but never counted."""

    prefixes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    occurrences: list[Occurrence] = field(default_factory=list)
    clock: int = 0
    shapes: bool = False  # whether it holds the shape of what it is given: RARE for every token that is not common

    def shape(self, tokens: Sequence[int]) -> Sequence[int]:
        return [t if t < COMMON_TOKENS else RARE for t in tokens] if self.shapes else tokens

    def append(self, sequence: int, tokens: Sequence[int], context: Sequence[int] = ()) -> None:
        if sequence in self.prefixes and context:
            raise ValueError(sequence)
        past = [*self.prefixes.setdefault(sequence, tuple(self.shape(context))), *self.tokens(sequence)]
        for token in self.shape(tokens):
            self.clock += 1
            self.occurrences.append(Occurrence(sequence, self.clock, tuple(past[-DEPTH:]), token))
            past.append(token)

    def truncate(self, sequence: int, length: int) -> None:
        kept = {o.time for o in [o for o in self.occurrences if o.sequence == sequence][:length]}
        self.occurrences = [o for o in self.occurrences if o.sequence != sequence or o.time in kept]

    def remove(self, sequences: Sequence[int]) -> None:
        self.occurrences = [o for o in self.occurrences if o.sequence not in sequences]
        for sequence in sequences:
            self.prefixes.pop(sequence, None)

    def tokens(self, sequence: int) -> list[int]:
        return [o.token for o in self.occurrences if o.sequence == sequence]

    def prefix(self, sequence: int) -> list[int]:
        return list(self.prefixes[sequence][-DEPTH:])

    def matches(self, context: Sequence[int], length: int) -> list[Occurrence]:
        """The occurrences whose context matches over at least `length` tokens, oldest first."""
        shape = self.shape(context[-SHAPE_DEPTH:] if self.shapes else context)
        return [o for o in self.occurrences if o.shares(shape) >= length]

    def successors(self, context: Sequence[int]) -> tuple[Counter[int], int | None]:
        """Counts of the tokens that followed the last DEPTH tokens of a context, and the newest such token."""
        found = self.matches(context, min(len(context), SHAPE_DEPTH if self.shapes else DEPTH))
        return Counter(o.token for o in found), found[-1].token if found else None


Cell = tuple[int, int, int, int, bool]


@dataclass(frozen=True)
class Level:
    """The matches of one length in one index: the symbols (next tokens) that no level before it offered, with counts.

    A level comes before another if its matches are longer, or as long and from an earlier index.
    """

    source: int
    length: int
    counts: Counter[int]
    newest: int
    excluded: int
    rated: int  # the source, or SHAPES

    @property
    def cell(self) -> Cell:
        """The key of the learned hit rate: source, length, occurrences, symbols, whether others are excluded."""
        total, distinct = (bucket(self.counts.total(), 7) + 1) // 2, (bucket(len(self.counts), 4) + 1) // 2
        return self.rated, self.length, total, distinct, self.excluded > 0

    @property
    def rank(self) -> int:
        """Its place in `RANKS`."""
        return RANKS.index((self.rated == SHAPES, self.length))

    def weight(self, token: int) -> float:
        """A token's count, with a bonus for the most recent. Tokens share the level's probability by weight."""
        return self.counts[token] + (RECENCY_BONUS if token == self.newest else 0.0)

    @property
    def weights(self) -> float:
        return self.counts.total() + RECENCY_BONUS

    @property
    def leader(self) -> int:
        """The token of the greatest weight; of equals the token with the lowest id."""
        return min(self.counts, key=lambda token: (-self.weight(token), token))


def levels(indexes: Sequence[tuple[ReferenceIndex, int]], context: Sequence[int]) -> Iterator[Level]:
    """Longest match first, earlier indexes first at each length (prediction by partial matching, with exclusion).

    Indexes of shapes follow all others.
    """
    offered: set[int] = set()
    for shapes in (False, True):
        for length in reversed(LENGTHS):
            for index, source in [each for each in indexes if each[0].shapes == shapes]:
                found = [o for o in index.matches(context, length) if not (shapes and o.token == RARE)]
                if novel := [o for o in found if o.token not in offered]:
                    counts, rated = Counter(o.token for o in novel), SHAPES if shapes else source
                    yield Level(source, length, counts, novel[-1].token, len(offered), rated)
                    offered.update(counts)


def exclusions(excluded: int) -> int:
    """The bucket of the number of symbols that levels before offered."""
    return 1 + bucket(excluded, 4) if excluded else 0


def bucket(n: float, buckets: int) -> int:
    """The bucket of `n`: 0, 1, 2, 3, ... for `n` up to 1, 2, 4, 8, ...; the last bucket takes all larger `n`."""
    return min(buckets - 1, max(0, math.ceil(math.log2(n))))


Tally = tuple[int, int]
"""Hits and misses."""


def one_more(tally: Tally, hit: bool) -> Tally:
    """A tally with one more try: both numbers halve, to an even one if between two, where they would exceed MEMORY."""
    hits, misses = tally[0] + hit, tally[1] + (not hit)
    return (hits, misses) if hits + misses <= MEMORY else (round(hits / 2), round(misses / 2))


def hit_rate(tally: Tally, prior: float) -> float:
    """The share of hits, where the prior weighs as much as PRIOR_TRIES tries."""
    return (tally[0] + PRIOR_TRIES * prior) / (sum(tally) + PRIOR_TRIES)


def prior(shapes: bool, length: int, total: float, excluded: float) -> float:
    """A guess from match length, occurrences and exclusions."""
    log_odds = (-3.3 if shapes else -1.9) + 0.7 * math.log2(length) + 0.7 * total - excluded
    return 1.0 / (1.0 + math.exp(-log_odds))


@dataclass
class DepthCorrection:
    """Corrects hit rates, learned over all tokens, for the depth in the draft: a draft begins where tokens are hard."""

    tallies: dict[tuple[int, int], Tally] = field(default_factory=dict)

    @staticmethod
    def cell(depth: int, rate: float) -> tuple[int, int]:
        return min(2, depth.bit_length()), bisect_left(EDGES, rate)

    def record(self, depth: int, rate: float, hit: bool) -> None:
        cell = self.cell(depth, rate)
        self.tallies[cell] = one_more(self.tallies.get(cell, (0, 0)), hit)

    def correct(self, depth: int, rate: float) -> float:
        """Multiply the odds of `rate` by the ratio of the odds in its bin, damped by some neutral tries, to those of
        the bin's middle.
        """
        hits, misses = self.tallies.get(cell := self.cell(depth, rate), (0, 0))
        yes = NEUTRAL_TRIES * (0.5 * ((EDGES[cell[1] - 1] if cell[1] else 0.0) + EDGES[cell[1]]))
        no = NEUTRAL_TRIES - yes
        hit, missed = rate * no * (hits + yes), (1.0 - rate) * yes * (misses + no)
        return hit / (hit + missed)


Node = tuple[int, int, float, int, int]


@dataclass
class Branch:
    """A node of a tree, -1 for the context, and its levels that were not looked at."""

    node: int
    path: tuple[int, ...]
    levels: Iterator[Level]
    reach: float  # probability of the node and of none of the tokens offered so far
    reported: float  # the same, corrected for depth
    next: Level | None = None

    def __post_init__(self) -> None:
        self.next = next(self.levels, None)


@dataclass
class ReferenceDrafter:
    """Learns the hit rate of every kind of level, and how often outputs go on after tokens that ended an output."""

    rates: dict[Cell, Tally] = field(default_factory=dict)
    depths: dict[bool, DepthCorrection] = field(default_factory=lambda: defaultdict(DepthCorrection))  # own text or not
    leads: DepthCorrection = field(default_factory=DepthCorrection)
    rests: dict[tuple[int, int], Tally] = field(default_factory=dict)
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)

    def rate(self, cell: Cell) -> float:
        rated, length, total, _, excluded = cell
        return hit_rate(self.rates.get(cell, (0, 0)), prior(rated == SHAPES, length, total, excluded))

    def rest(self, rank: int, excluded: int) -> float:
        """The rate of the levels of a rank and below, behind levels that offered so many (a bucket) symbols."""
        return hit_rate(self.rests.get((rank, excluded), (0, 0)), prior(*RANKS[rank], PRIOR_TOTAL, 0.5 * excluded))

    def share_left(self, level: Level) -> float:
        """How likely the levels from this one on hold the next token."""
        return max(self.rest(rank, exclusions(level.excluded)) for rank in range(level.rank + 1))

    def goes_on(self, token: int) -> float:
        ends, gone_on = self.ends.get(token, (0, 0))
        return (gone_on + 0.5) / (ends + gone_on + 0.5)

    def observe(
        self, indexes: Sequence[tuple[ReferenceIndex, int]], context: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Learn that `tokens` followed `context`: updates every level down to the level that held the token."""
        for i, token in enumerate(tokens):
            if token in self.ends:
                self.ends[token] = self.ends[token][0], self.ends[token][1] + 1
            consulted: list[Level] = []
            for level in levels(indexes, [*context, *tokens[:i]]):
                consulted.append(level)
                hit = token in level.counts
                self.depths[level.rated == Source.SESSION].record(i, self.rate(level.cell), hit)
                if hit and len(level.counts) > 1:
                    self.leads.record(i, level.weight(level.leader) / level.weights, token == level.leader)
                self.rates[level.cell] = one_more(self.rates.get(level.cell, (0, 0)), hit)
                if hit:
                    break
            self.observe_rest(consulted, token)

    def observe_rest(self, consulted: Sequence[Level], token: int) -> None:
        """Learn whether the levels from each rank on held the token."""
        if not consulted:
            return
        last, high = consulted[-1], consulted[0].rank
        steps = [(level.rank, level.excluded) for level in consulted]
        if not (hit := token in last.counts):
            steps.append((0, last.excluded + len(last.counts)))
        for low, excluded in steps:
            for rank in range(low, high + 1):
                cell = rank, exclusions(excluded)
                self.rests[cell] = one_more(self.rests.get(cell, (0, 0)), hit)
            high = low

    def observe_end(self, token: int) -> None:
        ends, gone_on = self.ends.get(token, (0, 0))
        self.ends[token] = ends + 1, max(0, gone_on - 1)
        if len(self.ends) > END_TOKENS:
            del self.ends[min(self.ends, key=lambda t: (self.ends[t][0], t))]

    def draft(
        self,
        indexes: Sequence[tuple[ReferenceIndex, int]],
        context: Sequence[int],
        max_tokens: int,
        min_probability: float = 0.0,
        chain: bool = False,
    ) -> list[Node]:
        """Rows of (token, parent, path probability, match length, source), likeliest path first.

        The rates over all depths decide the order; the reported probabilities are corrected for depth. A node's next
        level is looked at when it may be hoped to offer something as likely as the likeliest candidate found so far.
        """
        tree: list[Node] = []
        open_: list[tuple[float, int, int, int, int, float]] = []
        branches: list[Branch] = []
        node, reach, reported = -1, 1.0, 1.0
        path: tuple[int, ...] = ()
        while len(tree) < max_tokens and context:
            branches.append(Branch(node, path, levels(indexes, [*context, *path]), reach, reported))
            while branch := self.most_hoped_for(branches, -open_[0][0] if open_ else NEGLIGIBLE, min_probability):
                for entry in self.offers(branch):
                    if -entry[0] >= NEGLIGIBLE and entry[-1] >= min_probability:
                        heappush(open_, entry)
            if not open_:
                break
            score, parent, token, length, source, reported = heappop(open_)
            if chain:
                open_.clear()
                branches.clear()
            tree.append((token, parent, reported, length, source))
            node, goes_on = len(tree) - 1, self.goes_on(token)
            reach, reported, path = -score * goes_on, reported * goes_on, self.path(tree, node)
        return tree

    def most_hoped_for(self, branches: Sequence[Branch], best: float, min_probability: float) -> Branch | None:
        """The branch to look at next; of equals the first."""
        hopes = [
            (branch.reach * (WORTH * left), -branch.node, branch)
            for branch in branches
            if branch.next and branch.reported * (left := self.share_left(branch.next)) >= min_probability
        ]
        hope, _, branch = max(hopes, key=lambda each: each[:2], default=(0.0, 0, None))
        return branch if hope >= best else None

    def offers(self, branch: Branch) -> Iterator[tuple[float, int, int, int, int, float]]:
        """The candidates in a branch's next level, which is then behind it."""
        level = branch.next
        assert level is not None
        rate = self.rate(level.cell)
        corrected = self.depths[level.rated == Source.SESSION].correct(len(branch.path), rate)
        for token, share in self.shares(level, len(branch.path)).items():
            probability = branch.reach * rate / level.weights * level.weight(token)
            yield -probability, branch.node, token, level.length, level.source, branch.reported * corrected * share
        branch.reach, branch.reported = branch.reach * (1.0 - rate), branch.reported * (1.0 - corrected)
        branch.next = next(branch.levels, None)

    @staticmethod
    def path(tree: Sequence[Node], node: int) -> tuple[int, ...]:
        path = []
        while node >= 0:
            path.append(tree[node][0])
            node = tree[node][1]
        return tuple(reversed(path))

    def shares(self, level: Level, depth: int) -> dict[int, float]:
        """Each token's share of the level's probability: the leader's corrected, the others in their proportions."""
        shares = {token: level.weight(token) / level.weights for token in level.counts}
        if len(shares) > 1:
            lead = shares[level.leader]
            rest = (1.0 - self.leads.correct(depth, lead)) / (1.0 - lead)
            shares = {token: rest * share for token, share in shares.items()}
            shares[level.leader] = self.leads.correct(depth, lead)
        return shares
