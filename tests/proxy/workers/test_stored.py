"""What workers and the process of the engine tell each other of stored responses."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

from agentspec.cache.responses import MemoryResponses, ResponseLimits, StoredResponse
from agentspec.proxy.workers.stored import RemoteResponses, answer_responses, with_stored


@pytest.mark.anyio
@pytest.mark.parametrize("content", ["hi", "half \ud83d", 2**70, 1.5, None, {"a": [True]}])
async def test_what_a_worker_stores_is_what_it_reads(monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    """Text of an upstream's and numbers of a schema come as they are, but for what no text can be."""
    runtime: Any = SimpleNamespace(responses=MemoryResponses(ResponseLimits()))

    async def nobody(*given: Any) -> None:
        raise AssertionError

    app = with_stored(nobody, {RemoteResponses.route: lambda name, told: answer_responses(runtime, name, told)})
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")

    async def post(self: RemoteResponses, body: bytes) -> tuple[int, bytes]:
        answer = await client.post(self.route, content=body)
        return answer.status_code, answer.content

    monkeypatch.setattr(RemoteResponses, "_post", post)
    store = RemoteResponses(Path("none"))
    stored = StoredResponse(
        "resp_1", "alice", 1e12, "s", "resp_0", None, {"text": content}, [{"id": "i", "x": content}]
    )
    assert await anyio.to_thread.run_sync(store.put, stored)
    found = await anyio.to_thread.run_sync(store.get, "alice", "resp_1")
    shown = content.encode("utf-8", "replace").decode() if isinstance(content, str) else content
    assert found.response == {"text": shown} and found.items == [{"id": "i", "x": shown}]
    assert (found.id, found.tenant, found.session, found.previous) == ("resp_1", "alice", "s", "resp_0")
    assert await anyio.to_thread.run_sync(store.delete, "alice", "resp_1")
    assert await anyio.to_thread.run_sync(store.get, "alice", "resp_1") is None


def test_what_is_stored_too_late_for_its_worker_is_deleted_again() -> None:
    """The worker has told its client that nothing is stored, and asks no more."""
    runtime: Any = SimpleNamespace(responses=MemoryResponses(ResponseLimits()))
    told = {"id": "resp_1", "tenant": "alice", "created_at": 1e12}
    assert not answer_responses(runtime, "put", [told, time.monotonic() - 1.0])
    assert runtime.responses.get("alice", "resp_1") is None
    assert answer_responses(runtime, "put", [told, time.monotonic() + 100.0])
    assert runtime.responses.get("alice", "resp_1") is not None
