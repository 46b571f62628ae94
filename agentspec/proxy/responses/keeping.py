"""Stores answers and finds the conversations that requests continue, off the loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import anyio

from agentspec.cache.responses import StoredResponse
from agentspec.errors import AgentSpecError, CacheError, InvalidRequestError
from agentspec.protocol.openai_responses.items import Item, is_id
from agentspec.protocol.wire import encode
from agentspec.proxy.logs import logger
from agentspec.runtime import Runtime
from agentspec.settings.server import ServerSettings

if TYPE_CHECKING:
    from agentspec.cache.responses.table import ResponseStore

T = TypeVar("T")

THREADS = 8
PATIENCE = 10.0  # seconds that a client waits for its answer to be stored
MAX_STORED_ID = 128
MAX_CHAIN = 512
"""Answers that one conversation may consist of."""


class ResponseNotFoundError(InvalidRequestError):
    """There is no such stored response, or it is another tenant's, which must look the same."""

    status = 404
    code = "response_not_found"


def not_found(id: str, param: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(f"no response {id[:80]!r} is stored here", param=param)


@dataclass(frozen=True, slots=True)
class History:
    """The items of the answers that a request continues, and the bytes that they take."""

    items: list[Item]
    size: int


@dataclass(slots=True)
class Keeper:
    """The stored answers of a gateway. Its methods wait for the store in one of its own threads."""

    runtime: Runtime
    limits: ServerSettings
    _threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(THREADS))

    @property
    def stores(self) -> bool:
        """Whether anything may be kept."""
        return self.runtime.settings.cache.store

    async def put(self, stored: StoredResponse) -> bool:
        """Store an answer; False, with a warning in the log, if that cannot be done, or not in time.

        What a slow store commits after that is deleted again: the client is told that nothing is stored.
        """
        reason = f"the store took more than {PATIENCE:.0f} seconds"
        verdict: dict[str, bool] = {}  # set once: by the thread that has stored, or by who waits for it no longer
        try:
            with anyio.move_on_after(PATIENCE):
                return await self._in_thread(lambda: self._put(replace(stored, id=_key(stored.id)), verdict))
            if verdict.setdefault("kept", False):
                return True
        except CacheError as error:
            reason = error.message
        logger.warning("a response is not stored", error=reason)
        return False

    def _put(self, stored: StoredResponse, verdict: dict[str, bool]) -> bool:
        kept = self._store.put(stored)
        if kept and not verdict.setdefault("kept", True):
            try:
                self._store.delete(stored.tenant, stored.id)
            except AgentSpecError as error:
                logger.warning("a response stays stored, though its client was told otherwise", error=error.message)
        return kept

    async def get(self, tenant: str, id: str, param: str = "id") -> StoredResponse:
        """The tenant's answer. Raises `ResponseNotFoundError`."""
        found = await self._in_thread(lambda: self._store.get(tenant, _key(id))) if self.stores and is_id(id) else None
        if found is None:
            raise not_found(id, param)
        return replace(found, id=id)

    async def delete(self, tenant: str, id: str) -> None:
        """Raises `ResponseNotFoundError`."""
        if not (self.stores and await self.discard(tenant, id)):
            raise not_found(id, "id")

    async def discard(self, tenant: str, id: str) -> bool:
        """Delete the tenant's answer if it is there; returns whether it was."""
        return is_id(id) and await self._in_thread(lambda: self._store.delete(tenant, _key(id)))

    async def history(self, tenant: str, id: str) -> History:
        """The items of the answer `id`, of the ones that it continues, and of their inputs, oldest first.

        Raises `ResponseNotFoundError`, and `InvalidRequestError` for a conversation that is too long.
        """
        if not (self.stores and is_id(id)):
            raise not_found(id, "previous_response_id")
        return await self._in_thread(lambda: self._history(tenant, id))

    def _history(self, tenant: str, id: str) -> History:
        most_items, most_bytes = self.limits.max_messages, self.limits.max_body_bytes
        links: list[list[Item]] = []
        count = size = 0
        wanted: str | None = id
        while wanted is not None:
            stored = self._store.get(tenant, wanted)
            if stored is None or stored.backend is not None:
                raise _missing(id, wanted)
            links.append([*map(dict, stored.items), *stored.response.get("output", ())])
            count, size = count + len(links[-1]), size + len(encode(links[-1]))
            if len(links) > MAX_CHAIN or count > most_items or size > most_bytes:
                message = "the conversation that previous_response_id continues is too long to be read again"
                raise InvalidRequestError(message, param="previous_response_id")
            wanted = stored.previous
        return History([item for link in reversed(links) for item in link], size)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._threads)

    @property
    def _store(self) -> ResponseStore:
        return self.runtime.responses


def _missing(id: str, wanted: str) -> ResponseNotFoundError:
    if wanted == id:
        return not_found(id, "previous_response_id")
    message = f"the response {id!r} continues {wanted!r}, which is not stored any more"
    return ResponseNotFoundError(message, param="previous_response_id")


def _key(id: str) -> str:
    """The id under which stores keep a response: they take few characters. Nobody can ask for one with a blank."""
    return id if len(id) <= MAX_STORED_ID else f"long {hashlib.sha256(id.encode()).hexdigest()}"
