from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.cache.storage import database as database_module
from agentspec.cache.storage.database import PendingErasure
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import SqliteDatabase


class Recording(SqliteDatabase):
    """A database that counts how often it was written anew."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rewritten = 0
        self.in_use = False

    def secure_erase(self, *, rewrite: bool) -> bool:
        if rewrite and self.in_use:
            return False
        self.rewritten += rewrite
        return True


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
    erasure.mark(rewrite=True)
    erasure.finish(rewrite_within=1 << 20)
    assert erasure and ("every minute" in caplog.text) is not overwrites
    erasure.finish()
    assert not erasure and not database.rewritten
    now += 61.0
    assert bool(erasure) is not overwrites
    database.in_use = False
    erasure.finish()
    assert not erasure and database.rewritten == (not overwrites)
    database.close()


def test_a_database_is_written_anew_though_it_was_swept_in_between(tmp_path: Path) -> None:
    """As by the maintenance thread, between a deletion and the erasure that ends it."""
    store = SequenceStore.open(tmp_path, disk_bytes=None, mode="writer")
    rewritten: list[bool] = []
    erase = store.database.secure_erase

    def noted(*, rewrite: bool) -> bool:
        rewritten.append(rewrite)
        return erase(rewrite=rewrite)

    store.database.secure_erase = noted  # type: ignore[method-assign]
    store._erasure.mark(rewrite=True)
    for rewrite in (False, True, True):
        store.secure_erase(rewrite=rewrite)
    assert rewritten == [False, True]
    store.close()
