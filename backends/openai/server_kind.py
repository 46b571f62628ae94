"""Finds out what an upstream is, vLLM or SGLang, which accept fields of their own, and which routes it has."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, Literal, TypeVar

from agentspec.backends.http import MAX_LIST_BYTES, Endpoint, decode_json
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import UpstreamError, UpstreamStatusError

T = TypeVar("T")
ServerKind = Literal["vllm", "sglang", "other"]
FRESH_SECONDS = 60.0  # how long a detection result holds: another server may replace the upstream
RETRY_SECONDS = 5.0
LOOK_SECONDS = 2.0
ROUTE_SECONDS = 3600.0  # how long it holds that an upstream has a route, or does not have it
ROUTE_RETRY_SECONDS = 60.0  # after an answer that shows nothing, such as a refused key
_ACCOUNT = ("authorization", "x-api-key", "openai-", "anthropic-")  # other headers describe the real request
_HAS, _HAS_NOT = (400, 422), (200, 404, 405, 501)  # a server that accepts an empty request has no such route either


class _Result(Generic[T]):
    """What a question to the server found, and how long that holds. If the server does not answer, the last result
    holds, and so it does for the other requests while one asks again.
    """

    def __init__(self, value: T | None = None, fresh: float = FRESH_SECONDS, retry: float = RETRY_SECONDS) -> None:
        self.value = value
        self._fresh, self._retry, self._until = fresh, retry, -math.inf

    async def get(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """The result; None if there was never one. Asks, for at most `LOOK_SECONDS`, if no result holds."""
        clock = asyncio.get_running_loop().time
        if clock() >= self._until:
            if self.value is not None:
                self._until = clock() + self._retry
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    self.value = await ask()
                self._until = clock() + self._fresh
            except (UpstreamError, TimeoutError):
                self._until = clock() + self._retry
        return self.value


class ServerDetector:
    """Finds out what an upstream is, by the configuration or by asking its `/models`, and which routes other than those
    of chats and completions it has, by an empty request, which costs it nothing. Safe to use from several event loops.
    """

    def __init__(self, endpoint: Endpoint, settings: OpenAISettings) -> None:
        self._endpoint = endpoint
        self._configured = None if settings.server_kind == "auto" else settings.server_kind
        self._kind: _Result[ServerKind] = _Result(self._configured)
        self._routes: dict[str, _Result[bool]] = {}

    @property
    def known(self) -> ServerKind | None:
        """The last result, without asking."""
        return self._kind.value

    async def kind(self) -> ServerKind | None:
        """What it is; None if it has never answered."""
        if self._configured is None:
            await self._kind.get(lambda: _look(self._endpoint))
        return self._kind.value

    async def is_vllm(self) -> bool:
        """Whether it is vLLM. A server that has never answered counts as another, and gets no field it might refuse."""
        return await self.kind() == "vllm"

    async def has_route(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether it has `path`, asked with the client's key in `headers`; False while that is not known."""
        result = self._routes.setdefault(path, _Result(fresh=ROUTE_SECONDS, retry=ROUTE_RETRY_SECONDS))
        return bool(await result.get(lambda: self._has(path, headers)))

    async def _has(self, path: str, headers: Mapping[str, str]) -> bool:
        account = {name: value for name, value in headers.items() if name.startswith(_ACCOUNT)}
        given = {**account, "content-type": "application/json"}
        async with self._endpoint.send("POST", path, headers=given, body=b"{}", timeout=LOOK_SECONDS) as response:
            if response.status not in (*_HAS, *_HAS_NOT):
                raise UpstreamError(f"upstream {self._endpoint.name} does not show whether it has {path}")
            return response.status in _HAS


async def _look(endpoint: Endpoint) -> ServerKind:
    """The kind that the server names as the owner of its models, or else the one whose metrics it publishes.

    The metrics are requested only if the server refuses to list its models, because the key is missing: vLLM shows
    metrics without a key. Raises `UpstreamError` if the server answers neither.
    """
    try:
        return owner_of(await list_models(endpoint, LOOK_SECONDS))
    except UpstreamStatusError:
        content = await endpoint.fetch("GET", "/metrics", above=True, timeout=LOOK_SECONDS, limit=MAX_LIST_BYTES)
        names = [line.partition(b":")[0] for line in content.split(b"\n")]
        return "vllm" if b"vllm" in names else "sglang" if b"sglang" in names else "other"


async def list_models(endpoint: Endpoint, timeout: float) -> list[dict[str, Any]]:
    """The entries of `/models` that are objects. Raises `UpstreamError`."""
    content = await endpoint.fetch("GET", "/models", timeout=timeout, limit=MAX_LIST_BYTES)
    answer = decode_json(content, endpoint.name)
    listed = answer.get("data") if isinstance(answer, dict) else None
    return [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []


def owner_of(listed: list[dict[str, Any]]) -> ServerKind:
    """Which of the known servers owns one of the listed models."""
    owners = [model.get("owned_by") for model in listed]
    return "vllm" if "vllm" in owners else "sglang" if "sglang" in owners else "other"
