"""Both stores of usage: counts add up whoever adds them, age, and go with their tenant."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import exc

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import Selection, select
from agentspec.cache.storage.database import Database
from agentspec.cache.usage import COUNTS, MemoryUsage, UsageRow, UsageStore, day_of
from agentspec.cache.usage.alone import UsageAlone
from agentspec.cache.usage.row import BATCH_SECONDS, forgets_tenant, last_day, oldest_day
from agentspec.cache.usage.table import DatabaseUsage
from agentspec.errors import CacheUnavailableError

Open = Callable[..., UsageStore]
NOW = time.time()
TODAY = day_of(NOW)


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day does not end within a test."""
    monkeypatch.setattr(time, "time", lambda: NOW)


@pytest.fixture
def store(database: Database | None) -> Open:
    """Open a store that keeps so many days."""
    return lambda days=400: MemoryUsage(days) if database is None else DatabaseUsage(database, days)


def row(tenant: str = "a", key: str = "k", model: str = "m", day: str = TODAY, **counts: int) -> UsageRow:
    return UsageRow(day, tenant, key, model, **(counts or {"requests": 1, "prompt_tokens": 10}))


def add(store: UsageStore, *rows: UsageRow, since: float | None = None) -> dict[tuple[str, str], int]:
    return dict(store.add(rows, since=time.time() if since is None else since, day=TODAY))


def test_counts_add_up(store: Open) -> None:
    opened = store()
    assert opened.read() == [] and add(opened) == {} and opened.forget(select(tenant="a")) == 0
    full = row("wörld\0", **{name: number for number, name in enumerate(COUNTS, 1)})
    assert add(opened, full, row("b")) == {("wörld\0", "k"): full.tokens, ("b", "k"): 10}
    assert add(opened, full, row(day="2020-01-01")) == {("wörld\0", "k"): 2 * full.tokens, ("b", "k"): 10}
    assert opened.read() == [row(day="2020-01-01"), row("b"), full.plus(full)]
    assert add(opened)["b", "k"] == 10


def test_a_batch_that_comes_again_is_not_added_again(store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, since = store(), time.time()

    def told(batch: str | None) -> int:
        return opened.add([row("b"), row()], since=since, day=TODAY, batch=batch)["b", "k"]

    assert [told(name) for name in ("one", "one", "two", "one", None, None, "two")] == [10, 10, 20, 20, 30, 40, 40]
    assert [one.requests for one in opened.read()] == [4, 4]
    later = time.time() + BATCH_SECONDS + 9
    monkeypatch.setattr(time, "time", lambda: later)
    (fresh := store()).maintain()  # of another process, in a database
    (fresh if not isinstance(opened, MemoryUsage) else opened).maintain()
    assert told("one") == 50 and told("one") == 50


def test_a_batch_that_is_just_being_added_is_waited_for(store: Open) -> None:
    opened, others = store(), 8
    add(opened, row("z"))  # else all of them would make the table
    start = threading.Barrier(others)

    def tell(name: str) -> None:
        start.wait(30)
        opened.add([row()], since=time.time(), day=TODAY, batch=name)

    threads = [threading.Thread(target=tell, args=(f"b{number % 2}",)) for number in range(others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [one.requests for one in opened.read(tenant="a")] == [2]


def test_a_database_of_an_older_version_gets_the_names_of_batches(database: Database | None) -> None:
    if database is None:
        pytest.skip("memory has no versions")
    add(DatabaseUsage(database, 400), row())
    with database.writing() as connection:
        connection.exec_driver_sql("DROP TABLE IF EXISTS usage_batches")
    opened = DatabaseUsage(database, 400)
    opened.maintain()
    for _ in range(2):
        opened.add([row()], since=time.time(), day=TODAY, batch="one")
    assert [one.requests for one in opened.read()] == [2]


def test_rows_are_chosen_by_their_names_and_days(store: Open) -> None:
    opened = store()
    days = ["2026-01-01", "2026-01-02", "2026-01-03"]
    rows = [row(tenant, model=model, day=day) for day in days for tenant in "ab" for model in "mn"]
    add(opened, *rows)
    assert opened.read() == rows
    assert opened.read(tenant="a", model="n") == [one for one in rows if (one.tenant, one.model) == ("a", "n")]
    assert opened.read(since=days[1], until=days[1]) == [one for one in rows if one.day == days[1]]


@pytest.mark.usefixtures("still_clock")
def test_what_is_too_old_goes(store: Open) -> None:
    opened = store(days=2)
    old, young = oldest_day(time.time(), 3), oldest_day(time.time(), 2)
    add(opened, row(day=old), row(day=young), row())
    opened.maintain()
    assert [one.day for one in opened.read()] == [young, TODAY]


def test_a_tenant_is_forgotten_with_what_it_used(store: Open) -> None:
    opened = store()
    add(opened, row("a"), row("b"), row("a", day="2020-01-01"))
    for kept in (select(session="a"), select(tenant="a", session="s"), select(older_than=0.0)):
        assert opened.forget(kept) == 0
    for nameless in (select(tenant="a", session=""), select(tenant="a", tokenizer="")):
        assert opened.forget(nameless) == 0
    assert opened.forget(select(tenant="a", older_than=86400.0)) == 1
    assert opened.forget(select(tenant="a")) == 1
    assert opened.read() == [row("b")]


def test_a_day_that_is_not_over_is_not_old() -> None:
    midnight = 20_000 * 86400.0
    assert last_day(Selection(tenant="a", before=midnight)) == day_of(midnight - 1)
    assert last_day(Selection(tenant="a", before=midnight - 1)) == day_of(midnight - 86401)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("kl"), st.integers(0, 2**40)), max_size=20))
def test_totals_are_those_of_the_rows(steps: list[tuple[str, str, int]]) -> None:
    opened, totals = MemoryUsage(9), Counter[tuple[str, str]]()
    for tenant, key, tokens in steps:
        totals[tenant, key] += tokens
        found = add(opened, row(tenant, key, completion_tokens=tokens, requests=1))
        assert +Counter(found) == +totals
    assert sum(one.tokens for one in opened.read()) == totals.total()


def test_several_gateways_add_to_one_database(location: str | Path) -> None:
    rounds, gateways = 20, 3

    def work(opened: SuffixCache) -> None:
        for _ in range(rounds):
            add(opened.usage, row("a"), row("b"))

    caches = [SuffixCache.open(location, memory_bytes=1 << 20) for _ in range(gateways)]
    try:
        threads = [threading.Thread(target=work, args=(one,)) for one in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        count = rounds * gateways
        expected = [row(tenant, requests=count, prompt_tokens=10 * count) for tenant in "ab"]
        assert [one.usage.read() for one in caches] == [expected] * gateways
        assert add(caches[0].usage) == {("a", "k"): 10 * count, ("b", "k"): 10 * count}
    finally:
        for one in caches:
            one.close()
    with SuffixCache.open(location, memory_bytes=1 << 20) as opened:
        assert opened.usage.read() == expected
        asked = time.time()
        opened.forget(tenant="a")
        assert opened.usage.read() == expected[1:]
        add(opened.usage, row("a"), row("b"), since=asked)  # what a gateway had counted before
        assert opened.usage.read() == [expected[1].plus(row("b"))]
        add(opened.usage, row("a"))
        assert opened.usage.read(tenant="a") == [row("a")]


def test_a_gateway_without_models_needs_no_index(location: str | Path) -> None:
    alone = UsageAlone.open(location, 2)
    try:
        with SuffixCache.open(location, memory_bytes=1 << 20, usage_days=2) as opened:
            assert add(opened.usage, row()) == {("a", "k"): 10}
            assert add(alone, row(day=oldest_day(time.time(), 3)), row()) == {("a", "k"): 20}
            assert opened.usage.read() == [row(requests=2, prompt_tokens=20)], "what is too old went"
            opened.forget(tenant="a")
            assert alone.read() == []
    finally:
        alone.close()


@pytest.mark.parametrize("days", [630_000, 700_000, 10**6, 10**12])
def test_counts_may_be_kept_for_longer_than_the_calendar_goes_back(database: Database | None, days: int) -> None:
    store = MemoryUsage(days) if database is None else DatabaseUsage(database, days)
    add(store, row(), row(day="2020-01-01"))
    store.maintain()
    assert len(store.read()) == 2


def test_what_is_committed_is_never_said_to_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who adds would keep the counts, and add them twice."""
    alone = UsageAlone.open(tmp_path, 2)
    try:

        def fails(*_: object, **__: object) -> bool:
            raise exc.OperationalError("erasing", {}, RuntimeError("disk I/O error"))

        monkeypatch.setattr(type(alone._database), "secure_erase", fails)
        assert add(alone, row(day="2020-01-01")) == {}
        alone._look_at = 0.0
        assert add(alone, row()) == {("a", "k"): 10}
        assert alone.read() == [row()]
    finally:
        alone.close()


def test_a_database_that_is_away_is_said_to_be() -> None:
    with pytest.raises(CacheUnavailableError, match="cannot be opened"):
        UsageAlone.open("postgresql://nobody@127.0.0.1:9/none", 2)


def test_a_cache_in_memory_forgets_too() -> None:
    with SuffixCache.open() as opened:
        add(opened.usage, row("a"), row("b"))
        before = time.time()
        opened.forget(tenant="a")
        assert opened.usage.read() == [row("b")]
        add(opened.usage, row("a"), row("b"), since=before)  # what was counted before
        assert opened.usage.read() == [row("b").plus(row("b"))]
        add(opened.usage, row("a"))
        assert row("a") in opened.usage.read()


def test_only_the_deletion_of_a_whole_tenant_drops_what_waits() -> None:
    whole = select(tenant="a").scope
    assert forgets_tenant(whole, "a") and not forgets_tenant(whole, "b")
    for one in (select(tenant="a", session="s"), select(tenant="a", older_than=5.0), select(session="s")):
        assert not forgets_tenant(one.scope, "a")
    assert not forgets_tenant(replace(whole, searched=True), "a")


def test_bytes_of_forgotten_names_are_erased(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as opened:
        add(opened.usage, row("canary-tenant", "canary-key"))
        opened.forget(tenant="canary-tenant")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files and not any(b"canary" in file.read_bytes() for file in files)


def test_a_first_addition_that_fails_leaves_nothing_that_is_looked_for(
    database: Database | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CacheUnavailableError("away")

    if database is None:
        pytest.skip("nothing fails in memory")
    opened, before = DatabaseUsage(database, 400), database.disk_bytes()
    with monkeypatch.context() as broken, pytest.raises(CacheUnavailableError):
        broken.setattr(opened, "_add", fail)
        opened.add([row()], since=time.time(), day=TODAY, batch="b")
    opened.maintain()  # its tables went with the transaction
    assert database.disk_bytes() >= before and opened.read() == []
    assert add(opened, row()) == {("a", "k"): 10}


def test_a_cache_in_memory_drops_what_is_too_old_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else looks after it where no model draws on the cache."""
    now = NOW
    monkeypatch.setattr(time, "time", lambda: now)
    with SuffixCache.open(usage_days=2) as cache:
        assert isinstance(cache.usage, MemoryUsage)
        for day in range(20):
            now = NOW + day * 86400.0
            cache.usage.add([row(day=day_of(now))], since=now, day=day_of(now), batch=str(day))
        assert [one.day for one in cache.usage.read()] == [day_of(now - 86400.0), day_of(now)]
        assert 7 <= len(cache.usage._batches) <= 8
