"""Segments: what a process maps and what it reads from the database, when they are written, and what deletes them."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.index import IndexDrafter, propose_batch
from agentspec.cache.storage.codec import encode_learned
from agentspec.cache.tokens import Tokens
from agentspec.errors import CacheError
from agentspec.types import Namespace, path_length
from tests.cache.conftest import DATABASE, SQLITE_FIRST, execute, outputs, record, text, wait


def fill(folder: Path, count: int = 40, length: int = 100, **options: Any) -> None:
    with SuffixCache.open(folder, **options) as cache:
        for number in range(count):
            record(cache, text(number, length), session=f"s{number}")
        cache.compact()


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def known(cache: SuffixCache, numbers: range, tenant: str = "default") -> list[int]:
    """Which of the outputs are drafted."""
    found = []
    for number in numbers:
        output = text(number, 100)
        with cache.request(output[:3], namespace=tenant, session="probe", store=False) as request:
            request.drafter = IndexDrafter()
            if request.draft(1).tokens.tolist() == [output[3]]:
                found.append(number)
    return found


@pytest.mark.parametrize("way", ["mapped", "rebuilt"])
def test_a_new_process_drafts_as_the_writer_does(tmp_path: Path, way: str) -> None:
    """The writer's index has grown in several runs and the new one is one run, which makes no difference."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 8, 2) for _ in range(100)]
    with SuffixCache.open(tmp_path) as cache:
        for prompt in prompts:
            with cache.request(prompt) as request:
                request.extend(rng.integers(0, 8, 100))
        if way == "mapped":
            cache.compact()
        cache.flush()
        with SuffixCache.open(tmp_path, mode="follower") as follower:
            assert (follower.stats().segment_bytes > 0) == (way == "mapped")
            assert drafted(follower, prompts) == drafted(cache, prompts)


def drafted(cache: SuffixCache, prompts: list[Tokens]) -> list[tuple[list[int], list[float]]]:
    """Tokens and probabilities, by a drafter that has learned nothing."""
    drafts = []
    for prompt in prompts:
        with cache.request(prompt, store=False) as request:
            [draft] = propose_batch([(IndexDrafter(), request.indexes[1:], prompt, 16, 0.0, False)])
            drafts.append((draft.tokens.tolist(), draft.probabilities.tolist()))
    return drafts


def test_what_was_saved_is_mapped_and_the_rest_read(tmp_path: Path) -> None:
    fill(tmp_path)
    for mode in ("writer", "follower"):
        with SuffixCache.open(tmp_path, mode=mode) as cache:  # type: ignore[arg-type]
            stats = cache.stats()
            assert (stats.sequences, stats.tokens) == (40, 4000)
            assert stats.segment_bytes == 4000 * 4  # positions; the log is less than a chunk
            assert stats.memory_bytes > stats.segment_bytes
            assert stats.disk_bytes >= segments(tmp_path)[0].stat().st_size + (tmp_path / DATABASE).stat().st_size
            assert known(cache, range(41)) == list(range(40))
            cache.check_integrity()
    with SuffixCache.open(tmp_path) as cache:
        record(cache, text(40, 100))
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().segment_bytes > 0  # closing wrote none for so little
        assert known(cache, range(42)) == list(range(41))
        assert cache.stats().sequences == 41


# What was learned.

LEARNED = "agentspec_meta WHERE key <> 'version'"


def learn(cache: SuffixCache, seed: int, outputs: int, tenant: str = "default") -> None:
    """Have requests draft outputs of repeated pieces, of which half end with a token of their own."""
    rng = np.random.default_rng(seed)
    pieces = [text(100 * seed + number, int(rng.integers(2, 40)), 700) for number in range(60)]
    for number in range(outputs):
        output = np.concatenate([pieces[one] for one in rng.geometric(0.08, 8) % 60])
        with cache.request(output[:3], namespace=tenant, session=f"s{number}") as request:
            while len(rest := output[3 + len(request.output) :]):
                draft = request.draft(16)
                found = path_length(draft.tokens.tolist(), draft.parents.tolist(), rest.tolist())
                request.extend(rest[: 1 + found])
            request.extend([number % 2])


def drafts(cache: SuffixCache, tenant: str = "default") -> list[Any]:
    """What drafts hold after 200 contexts that neither learning nor drafting depends on, bit for bit."""
    found = []
    for number in range(200):
        context = text(100 + number % 60, 40, 700)[: 1 + number % 7]
        with cache.request(context, namespace=tenant, store=False) as request:
            draft = request.draft(32)
        columns = (draft.tokens, draft.parents, draft.probabilities, draft.match_length, draft.source)
        found.append([column.tobytes() for column in columns])
    return found


@SQLITE_FIRST
def test_drafts_and_their_probabilities_are_the_same_after_a_restart(
    location: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every match is looked at: a new process has text at other positions, by which samples are chosen."""
    monkeypatch.setattr("agentspec.cache.partition.IndexDrafter", partial(IndexDrafter, scan_limit=1 << 30))
    before: dict[str, list[Any]] = {}
    with SuffixCache.open(location) as cache:
        for tenant, outputs in (("a", 3), ("b", 30), ("c", 300)):
            learn(cache, 1, outputs, tenant)
            before[tenant] = drafts(cache, tenant)
    for _ in range(2):  # the second time nothing was learned, and what is stored stays
        with SuffixCache.open(location) as cache:
            assert {tenant: drafts(cache, tenant) for tenant in before} == before
    stored = execute(location, f"SELECT key, value FROM {LEARNED}")
    assert len(stored) == 3 and max(len(key) + len(value) for key, value in stored) <= 1500
    with SuffixCache.open(location) as cache:
        cache.forget(tenant="a")
        assert len(execute(location, f"SELECT * FROM {LEARNED}")) == 2
        for tenant in "bc":
            cache.request([1], namespace=tenant).partition.drafter = IndexDrafter()
            assert drafts(cache, tenant) != before[tenant]  # by rates that begin anew


@pytest.mark.parametrize(
    "change",
    [
        f"DELETE FROM {LEARNED}",  # as it was before anything learned was stored
        f"UPDATE {LEARNED.replace('WHERE', 'SET value = substr(value, 1, 300) WHERE')}",
        f"UPDATE {LEARNED.replace('WHERE', 'SET value = char(8364) || value WHERE')}",
        f"UPDATE {LEARNED.replace('WHERE', 'SET value = 7 WHERE')}",
        f"UPDATE {LEARNED.replace('WHERE', f'SET value = {encode_learned(np.ones(99, np.uint8))!r} WHERE')}",
    ],
    ids=["none", "cut", "text", "number", "of another length"],
)
def test_rates_begin_anew_where_what_was_learned_cannot_be_used(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    with SuffixCache.open(tmp_path) as cache:
        learn(cache, 1, 30)
        state = cache.request([1]).drafter.state()
    execute(tmp_path, change)
    with SuffixCache.open(tmp_path) as cache:
        assert not cache.request([1]).drafter.state().any() and cache.stats().sequences == 30
        assert ("is not used" in caplog.text) == (not change.startswith("DELETE"))
        learn(cache, 2, 3)
        state = cache.request([1]).drafter.state()
    with SuffixCache.open(tmp_path) as cache:
        assert np.array_equal(cache.request([1]).drafter.state(), state)


# When they are written.


def test_closing_and_growing_write_them(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        record(cache, text(0, 10_000))
    assert segments(tmp_path) == []
    with SuffixCache.open(tmp_path) as cache:
        record(cache, text(1, 10_000))
    assert len(segments(tmp_path)) == 1
    with SuffixCache.open(tmp_path) as cache:
        size = segments(tmp_path)[0].stat().st_size
        record(cache, text(2, 70_000))
        cache.flush()
        wait(lambda: segments(tmp_path)[0].stat().st_size > 4 * size)
        cache.forget(older_than=3600)
        cache.forget(session="none")
        assert len(segments(tmp_path)) == 1
        cache.forget(text=str(text(2, 70_000)[:5].tolist())[1:-1], decode=str)
        assert segments(tmp_path) == []
    assert len(segments(tmp_path)) == 1


# What the database does not hold any more.


def test_rows_that_went_meanwhile(tmp_path: Path) -> None:
    fill(tmp_path)
    execute(tmp_path, "DELETE FROM sequences WHERE session IN ('s3', 's39')")
    with SuffixCache.open(tmp_path) as cache:
        assert known(cache, range(40)) == [number for number in range(40) if number not in (3, 39)]
        assert cache.stats().segment_bytes == 0 and segments(tmp_path) == []
        cache.check_integrity()
    execute(tmp_path, "DELETE FROM sequences")
    with SuffixCache.open(tmp_path) as cache:
        assert (cache.stats().sequences, cache.stats().namespaces) == (0, 0)
        assert segments(tmp_path) == []


def test_a_segment_from_before_a_forget(tmp_path: Path) -> None:
    """As a process leaves it that is killed between the database and the file."""
    fill(tmp_path)
    [file] = segments(tmp_path)
    saved = file.read_bytes()
    with SuffixCache.open(tmp_path, mode="follower") as cache:
        cache.forget(session="s7")
        assert not file.exists()
    file.write_bytes(saved)
    with SuffixCache.open(tmp_path, mode="follower") as cache:
        assert known(cache, range(40)) == [number for number in range(40) if number != 7]
        assert not file.exists()


def test_a_segment_of_another_namespace_is_deleted_and_of_another_version_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SuffixCache.open(tmp_path) as cache:
        for tenant in "ab":
            record(cache, text(ord(tenant), 100), namespace=tenant)
        cache.compact()
    mine, others = (tmp_path / f"{Namespace(tenant).key}.segment" for tenant in "ab")
    others.write_bytes(mine.read_bytes())
    data = bytearray(mine.read_bytes())
    data[12] = 9
    mine.write_bytes(data)
    (tmp_path / "x.segment.new").write_bytes(b"half of one, by a writer that was killed")
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().sequences == 2 and cache.stats().segments_skipped == 2
        assert "version 9" in caplog.text and "namespace" in caplog.text
        wait(lambda: segments_of_any_kind(tmp_path) == [mine])
        cache.forget(session="of another")  # it cannot be told what is in it
        assert segments_of_any_kind(tmp_path) == []


def test_no_forgotten_byte_comes_back_while_it_compacts(tmp_path: Path) -> None:
    stop = threading.Event()

    def compact() -> None:
        while not stop.is_set():
            with suppress(CacheError):
                writer.compact()

    with SuffixCache.open(tmp_path) as writer, SuffixCache.open(tmp_path) as follower:
        thread = threading.Thread(target=compact)
        thread.start()
        try:
            for number in range(12):
                record(writer, text(number, 300), session=f"s{number}")
                writer.flush()
                time.sleep(0.02 * (number % 4))
                assert follower.forget(session=f"s{number}") == 1
                pattern = text(number, 300)[20:30].tobytes()
                assert not any(pattern in path.read_bytes() for path in segments_of_any_kind(tmp_path))
        finally:
            stop.set()
            thread.join()


def segments_of_any_kind(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.segment*") if path.exists()]


# Room.


def test_one_that_does_not_fit_in_memory_is_left(tmp_path: Path) -> None:
    fill(tmp_path, 40, 3000)
    with SuffixCache.open(tmp_path, memory_bytes=900 << 10) as cache:
        assert cache.stats().segment_bytes == 0
        assert 0 < cache.stats().sequences < 40
        assert cache.stats().memory_bytes <= 900 << 10


# Trouble.


def test_damage_is_told_and_costs_time_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path)
    [file] = segments(tmp_path)
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    for attempt in range(6):
        data = bytearray(good)
        if attempt % 4:
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        else:
            del data[int(rng.integers(len(data))) :]
        file.write_bytes(data)
        caplog.clear()
        with caplog.at_level(logging.WARNING), SuffixCache.open(tmp_path) as cache:
            assert cache.stats().sequences == 40 and cache.stats().segment_bytes == 0
            assert cache.stats().segment_error is not None
            assert len(caplog.records) == 1
            if attempt == 1:
                assert known(cache, range(40)) == list(range(40))
                cache.compact()
                assert cache.stats().segment_error is None
    file.write_bytes(good)
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().segment_bytes > 0


WRITER = """
import sys
import numpy as np
from agentspec.cache import SuffixCache
with SuffixCache.open(sys.argv[1]) as cache:
    print("open", flush=True)
    for number in range(int(sys.argv[2]), 10**9):
        with cache.request([1, 2], session=f"s{number}") as request:
            request.extend(np.random.default_rng(number).integers(0, 2**31 - 1, 3000).astype(np.int32))
        cache.compact()
        print("saved", flush=True)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.long)])
def test_a_kill_leaves_a_cache_that_opens(tmp_path: Path, kills: int) -> None:
    """Of a writer that saves segments all the time, at any moment."""
    generator = random.Random(3)
    stored = 0
    for kill in range(kills):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(stored)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "open\n"
            for _ in range(kill % 3):
                assert process.stdout.readline() == "saved\n"
            time.sleep(generator.uniform(0, 0.06))
            process.send_signal(signal.SIGKILL)
        with SuffixCache.open(tmp_path) as cache:
            stored = len(outputs(tmp_path))
            assert cache.stats().sequences == stored
            assert cache.stats().segment_error is None
            cache.check_integrity()
        saved = segments_of_any_kind(tmp_path)
        assert all(path.suffix == ".segment" for path in saved) and (saved or kill % 3 == 0)
    with SuffixCache.open(tmp_path) as cache:
        cache.compact()
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().segment_bytes > 0
