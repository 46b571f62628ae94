"""A store that is slower than the client waits for it keeps nothing that the client was told is not stored."""

from __future__ import annotations

import threading
import time

import anyio
import pytest

from agentspec.cache.responses import ResponseLimits, StoredResponse
from agentspec.cache.responses.table import ResponseStore
from agentspec.cache.storage.sqlite import MemoryDatabase
from agentspec.cache.storage.tables import prepare
from agentspec.errors import CacheError
from agentspec.proxy.responses.stored import Keeper
from agentspec.runtime import Runtime
from agentspec.settings.server import ServerSettings

pytestmark = pytest.mark.anyio
ANSWER = StoredResponse("resp_1", "t", time.time())


class SlowStore(ResponseStore):
    """Goes on when it may, and tells when a call has ended."""

    def __init__(self, *, broken: bool = False) -> None:
        prepare(database := MemoryDatabase())
        super().__init__(database, ResponseLimits())
        self.begun, self.may_go_on, self.ended = threading.Event(), threading.Event(), threading.Semaphore(0)
        self.broken = broken

    def put(self, stored: StoredResponse) -> bool:
        self.begun.set()
        assert self.may_go_on.wait(60)
        try:
            return super().put(stored)
        finally:
            self.ended.release()

    def delete(self, tenant: str, id: str) -> bool:
        try:
            if self.broken:
                raise CacheError("the disk is full")
            return super().delete(tenant, id)
        finally:
            self.ended.release()


def keeper(store: SlowStore) -> Keeper:
    class Stored(Runtime):
        responses = store  # type: ignore[assignment]

    return Keeper(Stored.__new__(Stored), ServerSettings())


@pytest.mark.parametrize("broken", [False, True])
async def test_what_is_stored_too_late_is_deleted(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store, patience = SlowStore(broken=broken), anyio.CancelScope()
    monkeypatch.setattr(anyio, "move_on_after", lambda seconds: patience)

    async def lose_patience() -> None:
        await anyio.to_thread.run_sync(store.begun.wait, 60)
        patience.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose_patience)
        assert not await keeper(store).put(ANSWER)
    store.may_go_on.set()
    for _ in ("put", "delete"):
        assert await anyio.to_thread.run_sync(store.ended.acquire, True, 60)
    assert (store.get("t", ANSWER.id) is not None) == broken


async def test_what_is_stored_in_time_stays() -> None:
    store = SlowStore()
    store.may_go_on.set()
    assert await keeper(store).put(ANSWER) and store.get("t", ANSWER.id) is not None
