"""Stored responses of all workers: kept by the engine's process, asked by the workers over its socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentspec.backends.http import LocalServer, pieces_of
from agentspec.cache.responses import StoredResponse
from agentspec.errors import CacheError, EngineRestartingError, UpstreamError
from agentspec.runtime import Runtime

PATH = "/stored-responses"
_SECONDS = 30.0


class RemoteResponses:
    """The store of the process whose socket is at `path`. For threads that anyio started from the worker's loop."""

    def __init__(self, path: Path) -> None:
        self._server = LocalServer(path)

    def put(self, stored: StoredResponse) -> bool:
        """As of `ResponseStore`. Raises `CacheError` if the process does not answer, too."""
        try:
            return bool(self._ask("put", asdict(stored)))
        except EngineRestartingError as error:
            raise CacheError(error.message) from None

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """As of `ResponseStore`. Raises `EngineRestartingError` if the process does not answer."""
        found = self._ask("get", tenant, id)
        return None if found is None else StoredResponse(**found)

    def delete(self, tenant: str, id: str) -> bool:
        """As of `ResponseStore`. Raises as `get`."""
        return bool(self._ask("delete", tenant, id))

    def _ask(self, name: str, *told: Any) -> Any:
        status, body = anyio.from_thread.run(self._post, orjson.dumps((name, told)))
        if status != 200:
            raise CacheError(body.decode())
        return orjson.loads(body)

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        try:
            with anyio.fail_after(_SECONDS):
                async with self._server.post(PATH, (), body) as answer:
                    return answer.status, b"".join([piece async for piece in pieces_of(answer)])
        except (UpstreamError, TimeoutError):
            raise EngineRestartingError("stored responses cannot be reached now; try again soon") from None


def with_stored(app: ASGIApp, runtime: Runtime) -> ASGIApp:
    """`app`, which answers what `RemoteResponses` asks, too."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await app(scope, receive, send)
            return
        name, told = orjson.loads(await Request(scope, receive).body())
        try:
            found = await anyio.to_thread.run_sync(_answer, runtime, name, told)
            response = Response(orjson.dumps(found), media_type="application/json")
        except CacheError as error:
            response = Response(error.message, 500)
        await response(scope, receive, send)

    return wrapped


def _answer(runtime: Runtime, name: str, told: list[Any]) -> Any:
    store = runtime.responses
    if name == "put":
        return store.put(StoredResponse(**told[0]))
    method: Callable[[str, str], Any] = {"get": store.get, "delete": store.delete}[name]
    return method(told[0], told[1])
