"""What is forgotten is gone, from drafts, memory, disk and other processes; and what text is never shared."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import Decode, Scope, select
from agentspec.cache.index import IndexDrafter
from agentspec.cache.tokens import Tokens
from agentspec.errors import CacheError, CacheUnavailableError, InvalidRequestError
from agentspec.types import Namespace
from tests.cache.conftest import SQLITE_FIRST, execute, outputs, record, text, wait
from tests.conftest import costly

CANARY = [777_000_000 + 7 * i for i in range(12)]


def spelled(ids: Iterable[int]) -> str:
    return "".join(f" {id}," for id in ids)


def searched(ids: Iterable[int]) -> dict[str, Any]:
    """The conditions of a search for the text of these tokens."""
    return {"text": spelled(ids), "decode": spelled}


@dataclass(frozen=True)
class Turn:
    tenant: str
    session: str | None
    prompt: list[int]
    output: list[int]

    def record(self, cache: SuffixCache) -> None:
        record(cache, self.output, self.prompt, namespace=self.tenant, session=self.session)


@dataclass(frozen=True)
class Forget:
    session: str | None
    tenant: str | None
    tokens: list[int] | None

    def conditions(self) -> dict[str, Any]:
        values = {"session": self.session, "tenant": self.tenant}
        named = {name: value for name, value in values.items() if value is not None}
        return named if self.tokens is None else named | searched(self.tokens)

    def means(self, turn: Turn) -> bool:
        text, pattern = turn.prompt[-64:] + turn.output, self.tokens or []
        return (
            self.session in (None, turn.session)
            and self.tenant in (None, turn.tenant)
            and any(text[i : i + len(pattern)] == pattern for i in range(len(text) + 1))
        )


tenants, names = st.sampled_from(["a", "b"]), st.sampled_from(["s", "t", None])


ids = st.sampled_from((0, 1, 2, 600, 700))  # the last two are rare: shapes do without them


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """A turn; one without a name begins as no named one does, or it would go on from that, and belong to it."""
    session, prompt = draw(names), draw(st.lists(ids, min_size=1, max_size=80))
    return Turn(
        draw(tenants), session, prompt if session else [9, *prompt], draw(st.lists(ids, min_size=1, max_size=20))
    )


forgets = st.builds(Forget, names, st.none() | tenants, st.none() | st.lists(ids, min_size=1, max_size=4)).filter(
    Forget.conditions
)


stories = st.lists(st.one_of(turns(), turns(), turns(), forgets, st.just("compact")), max_size=14)


Story = list[Turn | Forget | str]


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def rows(cache: SuffixCache, tenant: str, context: list[int]) -> list[object]:
    """The draft after a context, by a drafter that has learned nothing."""
    with cache.request(context, namespace=tenant, session="probe", store=False) as request:
        request.drafter = IndexDrafter()
        draft = request.draft(16)
    columns = (draft.tokens, draft.parents, draft.probabilities, draft.match_length, draft.source)
    return [column.tolist() for column in columns]


def tell(cache: SuffixCache, story: Story) -> list[Turn]:
    """Act a story out, checking what each forget says; returns the turns that are left."""
    left: list[Turn] = []
    for event in story:
        if isinstance(event, Turn):
            event.record(cache)
            left.append(event)
        elif isinstance(event, str):
            cache.compact()
        else:
            gone = [turn for turn in left if event.means(turn)]
            assert cache.forget(**event.conditions()) == len(gone)
            left = [turn for turn in left if not event.means(turn)]
    return left


def assert_equal_drafts(cache: SuffixCache, left: list[Turn]) -> None:
    with SuffixCache.open() as innocent:
        for turn in left:
            turn.record(innocent)
        for tenant in "ab":
            for context in ([0], [1, 2], [600, 700], [1, 800], *(turn.prompt + turn.output[:2] for turn in left[-3:])):
                assert rows(cache, tenant, context) == rows(innocent, tenant, context)
    cache.check_integrity()
    assert cache.stats().sequences == len(left)


def assert_ends_are_known(cache: SuffixCache, left: list[Turn]) -> None:
    """The learned tables keep no token that only forgotten outputs ended with."""
    for tenant in "ab":
        with cache.request([9], namespace=tenant, store=False) as request:
            ended = set(request.drafter.ends().tolist())
        assert ended == {turn.output[-1] for turn in left if turn.tenant == tenant}


@given(story=stories)
def test_a_cache_that_forgot_is_like_one_that_never_knew(story: Story) -> None:
    with SuffixCache.open() as cache:
        left = tell(cache, story)
        assert_ends_are_known(cache, left)
        assert_equal_drafts(cache, left)


@SQLITE_FIRST
@costly
@given(story=stories)
def test_so_is_one_on_disk_at_once_and_after_a_restart(location: str | Path, story: Story) -> None:
    folder = location
    with SuffixCache.open(folder) as cache:
        cache.forget(older_than=0)
    with SuffixCache.open(folder) as cache, SuffixCache.open(folder, mode="follower"):
        left = tell(cache, story)
        assert_ends_are_known(cache, left)
        assert_equal_drafts(cache, left)
    with SuffixCache.open(folder) as cache:
        assert_equal_drafts(cache, left)


def test_text_in_namespaces_of_its_tokenizer() -> None:
    with SuffixCache.open() as cache:
        for tokenizer in ("k", "other"):
            with cache.request([1], namespace=Namespace("t", "m", tokenizer)) as request:
                request.extend([ord(character) for character in "a secret"])
        decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
        assert cache.forget(text="secret", decode=decode, tokenizer="k") == 1
        assert cache.forget(text="secret", decode=decode, tokenizer="k") == 0
        assert cache.forget(text="secret", decode=decode) == 1
        assert cache.stats().forgotten == 2


# Requests in progress.


def test_a_request_in_progress_forgets_and_is_not_shared() -> None:
    with SuffixCache.open() as cache:
        record(cache, [10, 11, 12], [1], session="s")
        with (
            cache.request([5, 6, 7, 5], session="s") as mine,
            cache.request([5, 6, 7, 5], session="s") as beside,
            cache.request([5, 6, 7, 5], session="t") as other,
        ):
            for request in (mine, beside, other):
                assert request.draft(1).tokens.tolist() == [6]
            assert cache.forget(session="s") == 1
            for request in (mine, beside):
                assert len(request.draft()) == 0
                request.extend([8, 9, 8])
                assert len(request.draft()) == 0
            other.extend([6, 50, 51])
        assert cache.stats().sequences == 1
        with cache.request([1, 10], session="s") as request:
            assert len(request.draft()) == 0


@pytest.mark.parametrize("conditions", [{"tenant": "default"}, searched(CANARY)])
def test_so_does_everything_that_might_hold_what_is_searched(conditions: dict[str, Any]) -> None:
    with SuffixCache.open() as cache:
        with cache.request([*CANARY, *CANARY[:3]], session="s") as request:
            request.extend(CANARY[3:])
            cache.forget(**conditions)
            assert len(request.draft()) == 0
        assert cache.stats().sequences == 0
        record(cache, [10, 11, 12], [1], session="s")
        assert cache.stats().sequences == 1


def test_what_is_in_progress_has_no_age(location: str | Path) -> None:
    with SuffixCache.open(location) as cache:
        record(cache, [10, 11, 12], [1], session="s")
        with cache.request([5, 6, 7, 5], session="s") as request:
            assert cache.forget(older_than=0) == 1
            assert request.draft(1).tokens.tolist() == [6]
            request.extend([30, 31])
        assert cache.stats().sequences == 1
        assert cache.forget(older_than=3600) == 0


@SQLITE_FIRST
def test_threads_go_on_while_it_forgets(location: str | Path) -> None:
    """And of what waits to be written a search takes only what matches."""
    failures: list[BaseException] = []
    stop, stays = threading.Event(), [0, 0, 0]

    def work(worker: int) -> None:
        try:
            while not stop.is_set():
                record(cache, [10 + worker, *CANARY], [1, worker], session=f"s{worker}")
                record(cache, [10 + worker, 20, 30], [1, worker], session="stays")
                stays[worker] += 1
                time.sleep(0.001)
        except BaseException as error:
            failures.append(error)

    with SuffixCache.open(location) as cache:
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(5):
            cache.forget(**({"session": "s0"} if turn % 2 else searched(CANARY[:4])))
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        cache.forget(**searched(CANARY))
        cache.flush()
        left = cache.stats().sequences
        # A search takes along what each thread has in progress, when it begins and when it is applied.
        assert sum(stays) - 2 * 3 * 3 <= left <= sum(stays)
        cache.check_integrity()
    assert len(outputs(location)) == left


# Bytes on disk.


def traces(folder: Path, canary: Tokens, blobs: list[bytes]) -> list[str]:
    """Where a canary is left: as ids, in any compressed row, or as a piece of the rows that held it."""
    found, pieces = [], [np.frombuffer(blob, dtype="<u8", count=len(blob) // 8) for blob in blobs]
    for file in sorted(folder.iterdir()):
        try:
            raw = file.read_bytes()
        except FileNotFoundError:
            continue  # SQLite took its journal away
        if canary.astype("<i4").tobytes() in raw:
            found.append(f"{file.name}: ids")
        if any(canary.astype("<i4").tobytes() in row for row in _inflated(raw)):
            found.append(f"{file.name}: compressed row")
        if any(_shares(raw[start:], pieces) for start in range(8)):
            found.append(f"{file.name}: piece of a row")
    return found


def _shares(raw: bytes, pieces: list[NDArray[np.uint64]]) -> bool:
    """Whether 16 bytes of a piece, from a multiple of 8 on, lie in `raw` at a multiple of 8."""
    words, parts = np.frombuffer(raw, dtype="<u8", count=len(raw) // 8), [np.zeros(0, np.uint64), *pieces]
    first, second = (np.isin(words, np.concatenate([part[at : len(part) - 1 + at] for part in parts])) for at in (0, 1))
    return bool((first[:-1] & second[1:]).any())


def _inflated(raw: bytes) -> Iterator[bytes]:
    at = raw.find(b"\x78\x01")
    while at >= 0:
        with suppress(zlib.error):
            yield zlib.decompressobj().decompress(raw[at : at + 20_000])
        at = raw.find(b"\x78\x01", at + 1)


def stored_rows(location: str | Path, where: str = "1 = 1") -> list[bytes]:
    return [bytes(row[0]) for row in execute(location, f"SELECT tokens FROM sequences WHERE {where}")]


def filled(cache: SuffixCache, rounds: int = 60) -> None:
    """Rows of many sizes, some of which change places as they are hit; every third holds the canary."""
    for turn in range(rounds):
        output = text(turn, 10 + 97 * turn % 1500)
        held = [*output[:5], *CANARY, *output[5:]] if turn % 3 == 0 else output
        session = f"canary-session-{turn}" if turn % 3 == 0 else f"other-{turn}"
        with cache.request([1, 2], namespace="canary-tenant" if turn % 3 == 0 else "t", session=session) as request:
            request.extend(held)
        if turn % 10 == 9:
            with cache.request([1, 2, *output[:1]], session="x", store=False) as request:
                request.extend(output[1:8])
            cache.flush()
    cache.flush()


@pytest.mark.parametrize("follows", [pytest.param(False, marks=pytest.mark.slow), True])
def test_i9_no_byte_is_left(tmp_path: Path, follows: bool) -> None:
    with SuffixCache.open(tmp_path) as cache, SuffixCache.open(tmp_path, mode="follower") as follower:
        filled(cache)
        cache.compact()
        blobs = stored_rows(tmp_path, "session LIKE 'canary%'")
        assert len(blobs) == 20
        found = traces(tmp_path, np.array(CANARY), blobs)
        assert len(found) >= 4 and sum("segment" in trace for trace in found) >= 2  # the scan would see it
        forgetting = follower if follows else cache
        assert forgetting.forget(**searched(CANARY)) == 20
        assert traces(tmp_path, np.array(CANARY), blobs) == []
        raw = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert b"canary-session" not in raw and b"canary-tenant" not in raw
        assert len(stored_rows(tmp_path, "1")) == 40


def test_no_byte_is_left_by_age_without_rewriting(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        filled(cache)
        cache.compact()
        blobs = stored_rows(tmp_path)
        execute(tmp_path, "UPDATE sequences SET created_at = 5 WHERE session LIKE 'canary%'")
        old = stored_rows(tmp_path, "created_at = 5")
        assert 20 == len(old) < len(blobs)
    with SuffixCache.open(tmp_path, retention=86400) as cache:
        assert cache.stats().forgotten == 20
        assert cache.stats().sequences == 40
        assert traces(tmp_path, np.array(CANARY), old) == []


def dated(folder: Path, seconds: float) -> None:
    """Let all sequences be of a time so many seconds from now."""
    execute(folder, f"UPDATE sequences SET created_at = {time.time() + seconds}")


@pytest.mark.parametrize("compact", [False, True])
def test_a_shorter_retention_holds_from_the_first_draft(tmp_path: Path, compact: bool) -> None:
    with SuffixCache.open(tmp_path) as cache:
        record(cache, [10, 11, 12], [1], session="s")
        cache.flush()
        dated(tmp_path, -40 * 86400)
    with SuffixCache.open(tmp_path) as cache:
        if compact:
            cache.compact()
        for mode, days, known in (("follower", 30, 0), ("follower", 50, 1), ("writer", 30, 0)):
            if mode == "writer":
                cache.close()
            with SuffixCache.open(tmp_path, mode=mode, retention=days * 86400.0) as opened:  # type: ignore[arg-type]
                with opened.request([1, 10], session="new", store=False) as request:
                    assert bool(len(request.draft())) == bool(known)
                assert opened.stats().sequences == known


@pytest.mark.parametrize("way", ["retention", "older_than"])
def test_what_is_dated_ahead_is_old(tmp_path: Path, way: str) -> None:
    with SuffixCache.open(tmp_path) as cache:
        record(cache, [10, 11, 12], [1], session="s")
        cache.flush()
        dated(tmp_path, 10 * 365 * 86400)
    with SuffixCache.open(tmp_path, retention=1e9 if way == "retention" else None) as cache:
        assert way == "retention" or cache.forget(older_than=1e9) == 1
        assert (cache.stats().forgotten, stored_rows(tmp_path)) == (1, [])
        record(cache, [10, 11, 12], [1], session="s")  # not what is dated now
        cache.flush()
        assert cache.forget(older_than=1e9) == 0


@pytest.mark.parametrize("mode", [None, "writer", "follower"])
def test_a_process_keeps_to_its_retention_by_itself(tmp_path: Path, mode: Literal["writer", "follower"] | None) -> None:
    """In memory, and where an output could not be written, so that nothing in the database says when its term ends."""
    reported: list[object] = []
    SuffixCache.open(tmp_path).close()
    execute(tmp_path, "CREATE TRIGGER no BEFORE INSERT ON sequences BEGIN SELECT RAISE(ABORT, 'no'); END")
    with SuffixCache.open(tmp_path if mode else None, mode=mode or "auto", retention=0.01) as cache:
        cache.on_forget(reported.append)
        record(cache, [10, 11, 12], [1], session="s")
        wait(lambda: not cache.stats().sequences and not cache.stats().sessions and reported)


def test_what_cannot_be_deleted_is_told_and_kept(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        record(cache, [10, 11, 12], [1], session="s")
        cache.flush()
        execute(tmp_path, "CREATE TRIGGER broken BEFORE INSERT ON deletions BEGIN SELECT RAISE(ABORT, 'no room'); END")
        with pytest.raises(CacheError, match=r"nothing was forgotten.*no room"):
            cache.forget(session="s")
        execute(tmp_path, "DROP TRIGGER broken")
        assert cache.stats().sequences == 1
        assert cache.forget(session="s") == 1


# Other processes.


FOLLOWER = """
import sys
from agentspec.cache import SuffixCache
cache = SuffixCache.open(sys.argv[1], mode="follower")
mine = cache.request([9, 9], session="mine")
held = cache.request([40, 41, 40], session="s")
held.extend([41])
for line in sys.stdin:
    if line == "close\\n":
        held.close(); cache.flush(); print("closed", flush=True)
    elif line == "open drafts\\n":
        print(held.draft(1).tokens.tolist(), mine.draft(1).tokens.tolist(), flush=True)
    else:
        mine.extend([int(line)])
        print(mine.draft(1).tokens.tolist(), flush=True)
"""


def ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_another_process_follows_while_it_only_drafts(location: str | Path) -> None:
    command = [sys.executable, "-c", FOLLOWER, str(location)]
    with SuffixCache.open(location) as cache:
        record(cache, [10, 11, 12], [1], session="s")
        record(cache, [20, 21, 22], [1], session="t")
        cache.flush()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            try:
                assert ask(other, "10") == "[11]"
                assert ask(other, "open drafts").startswith("[40]")
                assert cache.forget(session="s") == 1
                wait(lambda: ask(other, "open drafts") == "[] []")
                assert ask(other, "20") == "[21]"  # the rest is still known
                assert ask(other, "close") == "closed"
            finally:
                other.kill()
        assert len(stored_rows(location)) == 1


def test_what_another_process_had_yet_to_write_is_refused(location: str | Path) -> None:
    """It closes, and writes, before it looks at what was forgotten. What was searched for it cannot know."""
    for conditions in ({"session": "s"}, {"tenant": "default"}, {"text": "never written", "decode": letters}):
        with SuffixCache.open(location) as writer, SuffixCache.open(location) as follower:
            late = follower.request([1], session="s")
            late.extend([10, 11, 12])
            writer.forget(**conditions)  # type: ignore[arg-type]
            late.close()
            with pytest.raises(CacheError, match="1 writes were dropped") if "text" in conditions else nullcontext():
                follower.flush()
            assert follower.stats().unwritten == ("text" in conditions)
            assert stored_rows(location) == []

            def heard(follower: SuffixCache = follower) -> bool:
                with follower.request([5, 10], session="new", store=False) as request:
                    return len(request.draft()) == 0

            wait(heard)
            wait(lambda follower=follower: follower.stats().sequences == 0)
            record(follower, [20, 21], [1], session="s")  # the name can be used again
            follower.flush()
            assert len(stored_rows(location)) == 1
            writer.forget(older_than=0)


FORGETTER = """
import sys
from agentspec.cache import SuffixCache
cache = SuffixCache.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
cache.forget(session="s")
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kills", [3, pytest.param(8, marks=pytest.mark.long)])
def test_a_kill_leaves_all_or_nothing(tmp_path: Path, kills: int) -> None:
    """Nothing forgotten comes back, and the next writer leaves no byte of it. The first kill comes before anything is
    forgotten, the last after all of it, the others anywhere.
    """
    outcomes = []
    generator = random.Random(5)
    with SuffixCache.open(tmp_path / "before") as cache:
        for turn in range(60):  # enough for closing to write a segment
            output = [*text(turn, 700), *CANARY] if turn % 2 else text(turn, 700)
            record(cache, output, [1], session="s" if turn % 2 else "t")
    for attempt in range(kills):
        folder = tmp_path / str(attempt)
        shutil.copytree(tmp_path / "before", folder)
        blobs = stored_rows(folder, "session = 's'")
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", FORGETTER, str(folder)], stdin=pipe, stdout=pipe, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            if attempt:
                process.stdin.write("go\n")
                process.stdin.flush()
                time.sleep(generator.uniform(0, 0.04))
            done = attempt == kills - 1 and process.stdout.readline() == "done\n"
            process.send_signal(signal.SIGKILL)
            done = process.stdout.read() == "done\n" or done
        with SuffixCache.open(folder) as cache:
            left = len(stored_rows(folder, "session = 's'"))
            outcomes.append(left)
            assert left in ((0,) if done else (0, 30))
            assert cache.stats().sequences == 30 + left
            if not left:
                assert traces(folder, np.array(CANARY), blobs) == []
    assert (outcomes[0], outcomes[-1]) == (30, 0)


# Listeners.


def test_a_deletion_that_the_database_interrupts_is_applied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.lifetime._MAINTENANCE_SECONDS", 1e6)  # this call fails, not the thread's
    reported: list[Scope] = []
    with SuffixCache.open(tmp_path) as cache:
        record(cache, CANARY, session="a")
        record(cache, text(1, 40), session="b")
        cache.on_forget(reported.append)

        def fails(*_: object) -> set[int]:
            raise CacheUnavailableError("the connection was lost")

        with monkeypatch.context() as lost, pytest.raises(CacheError, match="connection was lost"):
            lost.setattr("agentspec.cache.storage.sequence_store.SequenceStore.stored", fails)
            cache.forget(session="a")
        cache.forget(session="another")
        assert cache.stats().sequences == 1, "the deleted one would be drafted until the process ends"
        assert [scope.covers("a", 0.0) for scope in reported] == [True, False]


def test_listeners_that_raise_forget_or_leave_hold_nothing_up(location: str | Path) -> None:
    reported: list[str] = []
    with SuffixCache.open(location) as cache:
        for session in "abc":
            record(cache, [1, 2, ord(session)], session=session)

        def fails(scope: Scope) -> None:
            reported.append("fails")
            raise ValueError("of its own")

        def forgets(scope: Scope) -> None:
            reported.append("forgets")
            if scope.covers("a", 0.0):
                cache.forget(session="b")
                end()

        cache.on_forget(fails)
        end = cache.on_forget(forgets)
        deleting = threading.Thread(target=lambda: cache.forget(session="a"))
        deleting.start()
        deleting.join(60)
        assert not deleting.is_alive() and cache.stats().sequences == 1
        assert reported == ["fails", "forgets", "fails", "forgets"]
        end()
        cache.forget(session="c")
        assert reported[4:] == ["fails"]


# What a deletion covers, and what text is never shared.


def test_a_scope_tells_who_is_concerned_without_naming_anyone() -> None:
    scope = select(session="alice@example.org", tenant="acme", tokenizer="k", older_than=60).scope
    assert "alice" not in repr(scope) and "acme" not in repr(scope)
    assert scope.concerns(Namespace("acme", "m", "k")) and not scope.searched
    assert not scope.concerns(Namespace("acme", "m", "other")) and not scope.concerns(Namespace("acm", "m", "k"))
    now = time.time()
    assert scope.covers("alice@example.org", now - 70) and not scope.covers("alice@example.org", now - 50)
    assert not scope.covers("bob", now - 70) and not scope.covers(None, now - 70)


def test_ages_are_seconds_or_a_timedelta() -> None:
    for span in (60, 60.0, timedelta(minutes=1)):
        earliest = time.time() - 60
        before = select(older_than=span).before
        assert before is not None and earliest <= before <= time.time() - 60


@pytest.mark.parametrize(
    ("conditions", "param"),
    [
        ({}, None),
        ({"tokenizer": "k"}, None),
        ({"session": 5}, "session"),
        ({"text": "x"}, "text"),
        ({"text": "", "decode": str}, "text"),
        ({"text": "a", "decode": 5}, "decode"),
        ({"older_than": -1}, "older_than"),
        ({"older_than": "30d"}, "older_than"),
        ({"older_than": float("nan")}, "older_than"),
    ],
)
def test_conditions_that_cannot_be(conditions: dict[str, object], param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        select(**conditions)  # type: ignore[arg-type]
    assert caught.value.param == param


KEY = r"sk-[a-z0-9]{8}"


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def say(cache: SuffixCache, prompt: str, output: str, decode: Decode | None = letters) -> None:
    with cache.request(encode(prompt), session="s", decode=decode) as request:
        request.extend(encode(output))


def drafted(cache: SuffixCache, text: str, session: str) -> str:
    with cache.request(encode(text), session=session, store=False) as request:
        draft = request.draft(max_tokens=1)
        return letters(draft.tokens.tolist())


def test_a_secret_stays_in_its_own_session(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path, refuse_patterns=[KEY, "never this"]) as cache:
        say(cache, "the key: ", "sk-12345678 of course")
        assert (cache.stats().refused, cache.stats().sequences) == (1, 0)
        assert drafted(cache, "the key: sk-12345678 of course. again: sk-", "s") == "1"
        assert drafted(cache, "sk-", "other") == ""
        say(cache, "anything", "harmless")
        assert (cache.stats().refused, cache.stats().sequences) == (1, 1)
        assert drafted(cache, "ha", "other") == "r"
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().sequences == 1


def test_the_end_of_the_prompt_is_kept_and_so_looked_at() -> None:
    with SuffixCache.open(refuse_patterns=[KEY]) as cache:
        say(cache, "my key is sk-12345678", "thank you")
        say(cache, "my key is sk-1234", "5678")  # across
        say(cache, "my key is sk-12345678" + 64 * ".", "thank you")
        assert (cache.stats().refused, cache.stats().sequences) == (2, 1)


def test_what_cannot_be_read_is_refused() -> None:
    with SuffixCache.open(refuse_patterns=[KEY]) as cache:
        say(cache, "a", "harmless", decode=None)
        assert (cache.stats().refused, cache.stats().sequences) == (1, 0)
