"""Stored responses of all workers, and other stores: kept by the engine's process, which the workers ask."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.from_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentspec.backends.http import LocalServer, pieces_of
from agentspec.cache.responses import KeepsResponses, StoredResponse
from agentspec.errors import CacheError, EngineRestartingError, UpstreamError
from agentspec.protocol.responses import encode
from agentspec.runtime import Runtime

_SECONDS = 30.0
_TRAVEL = 5.0  # of them, that an answer may take to arrive
StoreHandlers = Mapping[str, Callable[[str, Sequence[Any]], Any]]
"""What is answered to the questions of remote stores, by their routes."""


class RemoteStore:
    """A store of the process whose socket is at `path`. For threads that anyio started from the worker's loop.

    Questions and answers are written as stores write them: orjson refuses half a surrogate pair, which an upstream may
    send, and integers beyond 64 bits, which a schema may hold.
    """

    route: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self._server = LocalServer(path)

    def ask(self, name: str, *told: Any) -> Any:
        """The answer to a question. Raises `CacheError`, and `EngineRestartingError` if the process does not answer."""
        status, body = anyio.from_thread.run(self._post, encode((name, told)))
        if status != 200:
            raise CacheError(body.decode())
        return json.loads(body)

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        try:
            with anyio.fail_after(_SECONDS):
                async with self._server.post(self.route, (), body) as answer:
                    return answer.status, b"".join([piece async for piece in pieces_of(answer)])
        except (UpstreamError, TimeoutError):
            message = "the engine's process, which has the cache, cannot be reached now; try again soon"
            raise EngineRestartingError(message) from None


class RemoteResponses(RemoteStore):
    """Stored responses of the engine's process."""

    route: ClassVar[str] = "/stored-responses"

    def put(self, stored: StoredResponse) -> bool:
        """As of `ResponseStore`. Raises `CacheError` if the process does not answer, too: it keeps nothing then."""
        try:
            return bool(self.ask("put", _members(stored), time.monotonic() + _SECONDS - _TRAVEL))
        except EngineRestartingError as error:
            raise CacheError(error.message) from None

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """As of `ResponseStore`. Raises `EngineRestartingError` if the process does not answer."""
        found = self.ask("get", tenant, id)
        return None if found is None else StoredResponse(**found)

    def delete(self, tenant: str, id: str) -> bool:
        """As of `ResponseStore`. Raises as `get`."""
        return bool(self.ask("delete", tenant, id))


def with_stored(app: ASGIApp, answers: StoreHandlers) -> ASGIApp:
    """`app`, which also answers what remote stores ask."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        answer = answers.get(scope["path"]) if scope["type"] == "http" else None
        if answer is None:
            await app(scope, receive, send)
            return
        asked = await Request(scope, receive).body()
        try:
            found = await anyio.to_thread.run_sync(lambda: encode(answer(*json.loads(asked))))
            response = Response(found, media_type="application/json")
        except CacheError as error:
            response = Response(error.message, 500)
        await response(scope, receive, send)

    return wrapped


def answer_responses(runtime: Runtime, name: str, told: Sequence[Any]) -> Any:
    """What `RemoteResponses` is answered."""
    store = runtime.responses
    if name == "put":
        return _put(store, StoredResponse(**told[0]), told[1])
    if name == "delete":
        return store.delete(told[0], told[1])
    found = store.get(told[0], told[1])
    return None if found is None else _members(found)


def _put(store: KeepsResponses, stored: StoredResponse, until: float) -> bool:
    """Store an answer, unless the worker has given up: at `until`, by the clock that the machine's processes share."""
    kept = store.put(stored)
    if kept and time.monotonic() > until:
        store.delete(stored.tenant, stored.id)
        return False
    return kept


def _members(stored: StoredResponse) -> dict[str, Any]:
    return {one.name: getattr(stored, one.name) for one in fields(stored)}
