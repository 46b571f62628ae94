from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import _native
from agentspec.cache.index import IndexDrafter, SuffixIndex, propose_batch
from agentspec.cache.tokens import EMPTY
from agentspec.errors import InvalidRequestError
from agentspec.types import Draft, Source
from tests.cache.native_index import NativeDrafter, NativeIndex, work


def index_of(*sequences: list[int]) -> NativeIndex:
    index = NativeIndex()
    for number, tokens in enumerate(sequences):
        index.append(number, tokens)
    return index


def test_unknown_sequences() -> None:
    index = index_of([1, 2, 3])
    with pytest.raises(InvalidRequestError):
        index.append(1, [-1])
    for call in (index.tokens, index.length):
        with pytest.raises(KeyError):
            call(99)
    with pytest.raises(KeyError):
        index.truncate(99, 0)
    index.remove([99])
    with pytest.raises(InvalidRequestError, match="context"):
        index_of([1]).append(0, [1], context=[2])


@pytest.mark.parametrize("token", [2**31 - 2, 2**31 - 3, 0])
def test_the_highest_token_is_like_any_other(token: int) -> None:
    """Common enough for every table; searches need a key behind it."""
    text = [token, token, 5] * 300
    index = index_of(text, text)
    assert index.successors([token]).counts.tolist() == [600, 600]
    assert index.count([token, token]) == 600
    assert len(NativeDrafter().draft([(index, Source.SHARED)], [token], 8)) == 8
    index.check_integrity()


def test_a_token_above_the_highest_is_refused() -> None:
    """By the native code too, whoever calls it."""
    index, drafter, none = SuffixIndex(), IndexDrafter(), EMPTY
    for bad in ([2**31 - 1], [-1], [-(2**31)]):
        array = np.array(bad, dtype=np.int32)
        for call in (
            lambda array=array: index.append(7, array, none),
            lambda array=array: index.append(7, none, array),
            lambda array=array: index.successors(array),
            lambda array=array: propose_batch([(drafter, [(index, 0)], array, 8, 0.0, False)]),
            lambda array=array: drafter.observe([(index, 0)], array, none),
            lambda array=array: drafter.observe([(index, 0)], none, array),
        ):
            with pytest.raises(InvalidRequestError, match="from 0 to 2"):
                call()
    assert index.sequence_count == 0


@pytest.mark.parametrize("text", [np.zeros(1 << 20), np.tile([1, 2], 1 << 19), np.arange(1 << 20) % 1000])
def test_repetition_is_not_quadratic(text: np.ndarray) -> None:
    tokens = text.astype(np.int32)
    index = NativeIndex()
    for begin in range(0, len(tokens), 256):
        index.append(0, tokens[begin : begin + 256])
    draft = NativeDrafter().draft([(index, Source.SESSION)], tokens[-64:], 32)
    assert len(draft) == 32  # after about one second; the square of a million takes hours
    assert index.memory_bytes() < 24 * len(tokens)


def assert_well_formed(draft: Draft, max_tokens: int, min_probability: float) -> None:
    assert len(draft) <= max_tokens
    arrays = (draft.tokens, draft.parents, draft.probabilities, draft.match_length, draft.source)
    assert [array.dtype.name for array in arrays] == ["int32", "int32", "float32", "int32", "uint8"]
    assert (draft.parents < np.arange(len(draft))).all() and (draft.parents >= -1).all()
    edges = list(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
    assert len(set(edges)) == len(edges)
    above = np.where(draft.parents >= 0, draft.probabilities[draft.parents], np.float32(1))
    assert (draft.probabilities <= above).all()
    assert (draft.probabilities >= np.float32(min_probability)).all()
    for parent in range(-1, len(draft)):
        assert draft.probabilities[draft.parents == parent].sum() <= 1.0001


@given(
    session=st.lists(st.integers(0, 3), max_size=300),
    shared=st.lists(st.integers(0, 3), max_size=300),
    max_tokens=st.integers(0, 40),
    min_probability=st.floats(0, 1),
)
def test_drafts_are_well_formed_whatever_is_sampled(
    session: list[int], shared: list[int], max_tokens: int, min_probability: float
) -> None:
    indexes = [(index_of(session), Source.SESSION), (index_of(shared), Source.SHARED)]
    draft = NativeDrafter(scan_limit=4).draft(indexes, session[-64:], max_tokens, min_probability)
    assert_well_formed(draft, max_tokens, min_probability)


def test_sampling_keeps_the_odds() -> None:
    """Of 30 000 matches about 64 are looked at; the odds of 3 to 1 must survive that."""
    rng = np.random.default_rng(1)
    text = np.empty(60_000, dtype=np.int32)
    text[::2] = 7
    text[1::2] = np.where(rng.random(30_000) < 0.75, 1, 2)
    draft = NativeDrafter().draft([(index_of(text.tolist()), Source.SHARED)], [7], 32)
    first = draft.parents == -1
    odds = dict(zip(draft.tokens[first].tolist(), draft.probabilities[first].tolist(), strict=True))
    assert 1.5 < odds[1] / odds[2] < 6


@given(st.integers(0, 1 << 32), st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 4))
def test_drafts_do_not_depend_on_when_runs_merge(seed: int, steps: list[int], ratio: int) -> None:
    """Though of many matches a few are looked at, some in tables, and learned from."""
    rng = np.random.default_rng(seed)
    at_once, later = NativeIndex(), NativeIndex(tail=20, ratio=ratio, deferred=True)
    drafters = NativeDrafter(scan_limit=4), NativeDrafter(scan_limit=4)
    for sequence, merged in enumerate(steps):
        text, drafts = np.minimum(rng.geometric(0.6, rng.integers(300, 600)), 4).tolist(), []
        for index, drafter in zip((at_once, later), drafters, strict=True):
            drafter.observe([(index, Source.SHARED)], [1, 0], text[:8])
            index.append(sequence, text, [1, 0])
            drafts.append([drafter.draft([(index, Source.SHARED)], text[: n * 5], 16) for n in range(1, 5)])
            for _ in range(merged):
                index.merge_step()
        for one, other in zip(*drafts, strict=True):
            assert (one.tokens == other.tokens).all() and (one.probabilities == other.probabilities).all()


def test_probabilities_are_honest() -> None:
    """A source that copies with a known error rate: predicted acceptance must come out as measured."""
    rng = np.random.default_rng(2)
    page = rng.integers(0, 50, 400).astype(np.int32)
    index, drafter = NativeIndex(), NativeDrafter()
    index.append(0, page)
    predicted = accepted = 0.0
    for _ in range(60):
        noisy = np.where(rng.random(400) < 0.9, page, rng.integers(0, 50, 400)).astype(np.int32)
        for at in range(20, 400, 5):
            draft = drafter.draft([(index, Source.SESSION)], noisy[:at], 8)
            predicted += float(draft.probabilities.sum())
            accepted += len(accepted_path(draft, noisy[at:].tolist()))
            drafter.observe([(index, Source.SESSION)], noisy[:at], noisy[at : at + 5])
    assert accepted > 1000
    assert abs(predicted - accepted) / accepted < 0.1


def accepted_path(draft: Draft, truth: list[int]) -> list[int]:
    path: list[int] = []
    node = -1
    for child, (parent, token) in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)):
        if parent == node and len(path) < len(truth) and token == truth[len(path)]:
            path.append(node := child)
    return path


def test_writers_take_turns() -> None:
    """Several threads append to one index, merging as they go; nothing is lost and readers see whole sequences."""
    index = NativeIndex(tail=16, ratio=2)
    rng = np.random.default_rng(6)
    texts = {number: rng.integers(0, 9, 200).astype(np.int32) for number in range(40)}

    def write(numbers: range) -> None:
        for number in numbers:
            for at in range(0, 200, 25):
                index.append(number, texts[number][at : at + 25])
            np.testing.assert_array_equal(index.tokens(number), texts[number])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, (range(start, 40, 4) for start in range(4))))
    index.check_integrity()
    everything = [text.tolist() for text in texts.values()]
    pairs = Counter(pair for text in everything for pair in pairwise(text))
    assert all(sum(index.successors([a]).counts) == sum(pairs[a, b] for b in range(9)) for a in range(9))


def filled(sequences: int, length: int, *, deferred: bool = True) -> NativeIndex:
    rng, index = np.random.default_rng(0), NativeIndex(deferred=deferred)
    for number in range(sequences):
        index.append(number, rng.integers(0, 1000, length).astype(np.int32))
    return index


def merged(index: NativeIndex) -> NativeIndex:
    while index.merge_step():
        pass
    return index


def test_what_is_done_while_others_wait_is_in_proportion_to_the_tokens() -> None:
    """By counts: neither adding nor forgetting looks at the index as a whole, however large it is."""
    for sequences in (100, 1000):
        index = merged(filled(sequences, 500))
        index.append(sequences, np.arange(500, dtype=np.int32))
        assert work(index).locked < 60 * 500 * (sequences + 1)
        before = work(index)
        index.remove(range(50))
        assert work(index).locked - before.locked < 50 * 500
        assert work(index).longest_hold < 80_000  # a small log is copied as it grows, a large one is not
        merged(index)
        assert work(index).longest_hold < 80_000  # a small log is copied as it grows, a large one is not
        index.check_integrity()


def test_pages_given_back_before_a_piece_leave_a_sound_index() -> None:
    """The token before a piece without a context is another piece's: its page may go, and nothing may depend on it."""
    kept = np.arange(20_000, dtype=np.int32)
    index = NativeIndex()
    index.append(0, np.full(100 * 1024 - 67, 7, np.int32))  # the boundary behind it begins a page
    index.append(1, kept)
    index.remove([0])
    index.check_integrity()
    np.testing.assert_array_equal(index.tokens(1), kept)
    assert index.successors(kept[:5]).most_recent == kept[5]


def test_a_full_index_takes_no_more_and_loses_nothing() -> None:
    index = NativeIndex(capacity=1100)
    index.append(0, range(900))
    with pytest.raises(InvalidRequestError, match="full: 1100 positions"):
        index.append(1, range(200))
    assert (index.token_count, index.tokens(0).tolist()) == (900, list(range(900)))
    index.remove([0])
    index.append(1, range(200))


def test_an_append_waits_for_no_reader() -> None:
    """Eight threads draft without a pause; hundreds of appends get through, each waiting for other changes alone."""
    index, stop = filled(50, 400), threading.Event()

    def read() -> None:
        drafter = NativeDrafter()
        while not stop.is_set():
            drafter.draft([(index, Source.SHARED)], [1, 2, 3], 32)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(8)]
    for reader in readers:
        reader.start()
    for number in range(100, 400):
        index.append(number, [1, 2, 3, 4])
    stop.set()
    for reader in readers:
        reader.join()
    assert index.sequence_count == 350


def test_learning_waits_for_no_draft() -> None:
    """What is learned while a draft is made waits, and is known afterwards as if there had been no draft."""
    index, learned = filled(50, 400), []
    for holds in (True, False):
        drafter = NativeDrafter()
        reading = _native.DrafterReading(drafter) if holds else None

        def learn(drafter: NativeDrafter = drafter) -> None:
            for start in range(40):
                text = index.tokens(start % 7)
                drafter.observe([(index, Source.SHARED)], text[:start], text[start : start + 5])
                drafter.observe_end(int(text[start]))

        thread = threading.Thread(target=learn, daemon=True)
        before = drafter.memory_bytes()
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and drafter.memory_bytes() > before
        del reading
        texts = (index.tokens(number)[:30] for number in range(50))
        drafts = [drafter.draft([(index, Source.SHARED)], text, 16) for text in texts][1:]  # the first takes it in
        learned.append([draft.probabilities.tolist() for draft in drafts])
    assert learned[0] == learned[1]


def test_the_least_recently_used_are_known_without_a_search() -> None:
    index = filled(20, 100)
    assert index.oldest(250).tolist() == [0, 1, 2]
    NativeDrafter().observe([(index, Source.SHARED)], index.tokens(1)[:10], index.tokens(1)[10:12])
    index.append(0, [5])
    index.remove([2])
    assert index.oldest(250).tolist() == [3, 4, 5]
    assert index.oldest(10**9).tolist() == [*range(3, 20), 1, 0]


def test_two_indexes_are_read_in_any_order_without_a_deadlock() -> None:
    one, two = index_of([1, 2, 3] * 30), index_of([1, 2, 4] * 30)
    stop = threading.Event()
    orders = ([(one, 0), (two, 1)], [(two, 0), (one, 1)])

    def read(indexes: list[tuple[NativeIndex, int]]) -> None:
        while not stop.is_set():
            NativeDrafter().draft(indexes, [1, 2], 8)

    def write(index: NativeIndex) -> None:
        number = 10
        while not stop.is_set():
            index.append(number, [1, 2, 5])
            number += 1

    threads = [threading.Thread(target=read, args=(order,), daemon=True) for order in orders]
    threads += [threading.Thread(target=write, args=(index,), daemon=True) for index in (one, two)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_the_stub_is_current(tmp_path: Path, repository: Path) -> None:
    fresh = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "agentspec.cache._native", "-o", str(fresh)]
    subprocess.run(command, check=True)
    checked_in = (repository / "cache" / "_native.pyi").read_text()
    generated = "".join(line for line in checked_in.splitlines(keepends=True) if not line.startswith("# "))
    assert generated == fresh.read_text(), f"run: {' '.join(command[:-1])} cache/_native.pyi, and keep its first lines"


def test_a_missing_extension_names_the_build_command() -> None:
    code = (
        "import sys; sys.modules['agentspec.cache._native'] = None\n"
        "from agentspec.errors import ConfigurationError\n"
        "try:\n    import agentspec.cache.index\n"
        "except ConfigurationError as error:\n"
        "    assert isinstance(error, ImportError) and 'pip install -e .' in str(error); print('named')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "named\n"


@given(st.lists(st.integers(0, 5), min_size=300, max_size=1500), st.integers(0, 5), st.randoms(use_true_random=False))
def test_long_runs_are_searched_by_their_tables(tokens: list[int], common: int, random: random.Random) -> None:
    """Runs long enough for tables, with tokens common enough to be sampled; counts are exact all the same."""
    text = [common if random.random() < 0.4 else token for token in tokens]
    index, cut = NativeIndex(tail=16, ratio=2), random.randrange(1, len(text))
    index.append(0, text)
    index.append(1, text[:cut])
    index.truncate(0, len(text) - cut // 2)
    kept = [text[: len(text) - cut // 2], text[:cut]]
    for context in ([a] for a in range(7)):
        check_successors(index, kept, context)
    for _ in range(30):
        sequence, length = random.choice(kept), random.choice((1, 2, 2, 3, 5, 9))
        end = random.randrange(len(sequence) + 1)
        check_successors(index, kept, [*sequence[max(0, end - length) : end], random.randrange(7)])
    index.check_integrity()


def check_successors(index: NativeIndex, sequences: list[list[int]], context: list[int]) -> None:
    sought = re.compile(b"(?=" + re.escape(bytes(context)) + b"(.))", re.DOTALL)  # overlapping places too
    counts = Counter(found[1][0] for s in sequences for found in sought.finditer(bytes(s)))
    found = index.successors(context)
    assert dict(zip(found.tokens.tolist(), found.counts.tolist(), strict=True)) == counts
