"""The native index and drafter agree with their plain Python twins after any sequence of operations."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from agentspec.types import Source
from tests.cache.native_index import NativeDrafter, NativeIndex
from tests.cache.reference import ReferenceDrafter, ReferenceIndex

NO_SAMPLING = 1 << 30


def periodic(pattern: list[int], length: int) -> list[int]:
    return (pattern * (length // len(pattern) + 1))[:length]


tokens = st.sampled_from((0, 1, 600, 700))  # the last two are rare
tiny = st.lists(st.sampled_from((0, 1, 600)), max_size=60)
wide = st.lists(st.integers(0, 2**31 - 2), max_size=40)
repetitive = st.builds(periodic, st.lists(tokens, min_size=1, max_size=4), st.integers(0, 100))
texts = st.one_of(tiny, wide, repetitive)
contexts = st.one_of(st.lists(tokens, min_size=1, max_size=8), repetitive.filter(bool))


def assert_same_answers(native: NativeIndex, twin: ReferenceIndex, context: list[int]) -> None:
    counts, newest = twin.successors(context)
    found = native.successors(context)
    assert dict(zip(found.tokens.tolist(), found.counts.tolist(), strict=True)) == counts
    assert found.most_recent == newest


def assert_same_drafts(
    pairs: list[tuple[NativeIndex, ReferenceIndex, int]],
    native: NativeDrafter,
    twin: ReferenceDrafter,
    context: list[int],
    max_tokens: int,
    min_probability: float,
    *,
    chain: bool = False,
) -> None:
    natives, twins = ([(pair[of], pair[2]) for pair in pairs] for of in (0, 1))
    draft = native.draft(natives, context, max_tokens, min_probability, chain=chain)
    rows = twin.draft(twins, context, max_tokens, min_probability, chain)
    expected = list(zip(*rows, strict=True)) if rows else [(), (), (), (), ()]
    assert draft.tokens.tolist() == list(expected[0])
    assert draft.parents.tolist() == list(expected[1])
    np.testing.assert_allclose(draft.probabilities, expected[2], rtol=0, atol=1e-5)
    assert draft.match_length.tolist() == list(expected[3])
    assert draft.source.tolist() == list(expected[4])


class SameIndex(RuleBasedStateMachine):
    """Open, append, truncate and remove sequences in any order, in both implementations.

    Merges are done at once, or wait for steps that come at any time: no answer depends on it. The index is of text or
    of its shapes.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.drafter = NativeDrafter(scan_limit=NO_SAMPLING)
        self.twin_drafter = ReferenceDrafter()

    @initialize(deferred=st.booleans(), shapes=st.booleans())
    def create(self, deferred: bool, shapes: bool) -> None:
        self.native = NativeIndex(tail=5, ratio=2, deferred=deferred, shapes=shapes)
        self.twin = ReferenceIndex(shapes=shapes)

    @rule(steps=st.integers(1, 3))
    def merge(self, steps: int) -> None:
        for _ in range(steps):
            assert self.native.merge_step() or not self.native.merging_due

    @rule(target=sequences, sequence=st.integers(0, 5), tokens=texts, context=tiny)
    def open(self, sequence: int, tokens: list[int], context: list[int]) -> object:
        if sequence in self.twin.prefixes:
            return multiple()
        self.native.append(sequence, tokens, context)
        self.twin.append(sequence, tokens, context)
        return sequence

    @rule(sequence=sequences, tokens=texts)
    def append(self, sequence: int, tokens: list[int]) -> None:
        if sequence in self.twin.prefixes:
            self.native.append(sequence, tokens)
            self.twin.append(sequence, tokens)

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        if sequence in self.twin.prefixes:
            length = int(share * len(self.twin.tokens(sequence)))
            self.native.truncate(sequence, length)
            self.twin.truncate(sequence, length)

    @rule(gone=st.lists(consumes(sequences), min_size=1, max_size=3))
    def remove(self, gone: list[int]) -> None:
        self.native.remove(gone)
        self.twin.remove(gone)

    @rule(context=contexts)
    def query(self, context: list[int]) -> None:
        assert_same_answers(self.native, self.twin, context)

    @rule(context=contexts, tokens=st.lists(tokens, max_size=6))
    def learn(self, context: list[int], tokens: list[int]) -> None:
        self.drafter.observe([(self.native, Source.SHARED)], context, tokens)
        self.twin_drafter.observe([(self.twin, Source.SHARED)], context, tokens)

    @rule(token=tokens)
    def end(self, token: int) -> None:
        self.drafter.observe_end(token)
        self.twin_drafter.observe_end(token)

    @precondition(lambda self: len(self.twin.occurrences) < 250)
    @rule(context=contexts, max_tokens=st.integers(0, 12), chain=st.booleans())
    def draft(self, context: list[int], max_tokens: int, chain: bool) -> None:
        pairs = [(self.native, self.twin, Source.SHARED)]
        assert_same_drafts(pairs, self.drafter, self.twin_drafter, context, max_tokens, 0.0, chain=chain)

    @invariant()
    def intact(self) -> None:
        self.native.check_integrity()
        assert self.native.sequence_count == len(self.twin.prefixes)
        assert self.native.token_count == len(self.twin.occurrences)

    @rule(sequence=sequences)
    def read(self, sequence: int) -> None:
        if sequence in self.twin.prefixes:
            assert self.native.tokens(sequence).tolist() == self.twin.tokens(sequence)
            assert self.native.length(sequence) == len(self.twin.tokens(sequence))
            assert self.native.prefix(sequence).tolist() == self.twin.prefix(sequence)


TestSameIndex = SameIndex.TestCase
TestSameIndex.settings = settings(stateful_step_count=25)


@given(session=texts, shared=texts, output=st.lists(tokens, max_size=10), floor=st.floats(0, 0.3))
def test_sources_and_shapes_draft_alike_while_learning(
    session: list[int], shared: list[int], output: list[int], floor: float
) -> None:
    natives = NativeIndex(tail=3, ratio=1), NativeIndex(shapes=True), NativeIndex()
    twins = ReferenceIndex(), ReferenceIndex(shapes=True), ReferenceIndex()
    for index in (natives, twins):
        index[0].append(0, session)
        index[1].append(0, shared)
        index[2].append(0, shared)
    sources = (Source.SESSION, Source.SHARED, Source.SHARED)
    drafter, twin_drafter = NativeDrafter(scan_limit=NO_SAMPLING), ReferenceDrafter()
    context = session[-64:]
    for token in output:
        pairs = list(zip(natives, twins, sources, strict=True))
        for chain in (False, True):
            assert_same_drafts(pairs, drafter, twin_drafter, context, 8, floor, chain=chain)
        drafter.observe(list(zip(natives, sources, strict=True)), context, [token])
        twin_drafter.observe(list(zip(twins, sources, strict=True)), context, [token])
        natives[0].append(0, [token])
        twins[0].append(0, [token])
        context = [*context, token][-64:]


@given(text=st.one_of(tiny, repetitive), context=contexts)
def test_counts_agree_for_one_text(text: list[int], context: list[int]) -> None:
    native, twin = NativeIndex(tail=8, ratio=4), ReferenceIndex()
    native.append(7, text)
    twin.append(7, text)
    assert_same_answers(native, twin, context)
