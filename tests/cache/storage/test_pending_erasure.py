from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from agentspec.cache.storage import database as database_module
from agentspec.cache.storage.database import PendingErasure
from agentspec.cache.storage.sqlite import SqliteDatabase


class Recording(SqliteDatabase):
    """A database that notes whose rows were to be rewritten."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rewritten: set[str] = set()
        self.in_use = False

    def rewritten_bytes(self, tenants: Collection[str] | None) -> int:
        return 0

    def secure_erase(self, *, rewrite: bool, tenants: Collection[str] | None = None) -> bool:
        if rewrite and self.in_use:
            return False
        if rewrite:
            self.rewritten.update(tenants or ())
        return True


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_what_is_deleted_while_another_deletion_is_erased_is_erased_too(tmp_path: Path, restless: None) -> None:
    database = Recording(tmp_path)
    erasure = PendingErasure(database)
    names = [[f"{thread} {number}" for number in range(8000)] for thread in range(2)]

    def delete(tenants: list[str]) -> None:
        for tenant in tenants:
            erasure.mark([tenant])

    threads = [threading.Thread(target=delete, args=(tenants,)) for tenants in names]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        erasure.finish(rewrite_within=1)
    erasure.finish(rewrite_within=1)
    assert database.rewritten == {*names[0], *names[1]}
    database.close()


@pytest.mark.parametrize("overwrites", [True, False])
def test_what_others_used_is_rewritten_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overwrites: bool
) -> None:
    """A server's plain VACUUM, which comes next, leaves the bytes of deleted rows where they are."""
    now = 1000.0
    monkeypatch.setattr(database_module.time, "monotonic", lambda: now)
    database = Recording(tmp_path)
    database.overwrites = overwrites
    database.in_use = True
    erasure = PendingErasure(database)
    erasure.mark(["a"])
    erasure.finish(rewrite_within=1)
    assert erasure and ("every minute" in caplog.text) is not overwrites
    erasure.finish()
    assert not erasure and not database.rewritten
    now += 61.0
    assert bool(erasure) is not overwrites
    database.in_use = False
    erasure.finish()
    assert not erasure and database.rewritten == (set() if overwrites else {"a"})
    database.close()
