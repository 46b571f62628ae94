"""Finds out what an upstream is, vLLM or SGLang, whose own fields we use, and which routes it has."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any, Literal

from agentspec.backends.http import MAX_LIST_BYTES, Endpoint, decode_json
from agentspec.backends.openai.metrics import read_drafter
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import UpstreamError, UpstreamStatusError

ServerKind = Literal["vllm", "sglang", "other"]
FRESH_SECONDS = 60.0  # how long a detection result holds: another server may replace the upstream
RETRY_SECONDS = 5.0
LOOK_SECONDS = 2.0
ROUTE_SECONDS = 3600.0  # how long it holds that an upstream has a route, or has it not
ROUTE_RETRY_SECONDS = 60.0  # after an answer that tells nothing, such as a refused key
_ACCOUNT = ("authorization", "x-api-key", "openai-", "anthropic-")  # another header would tell of the real request
_HAS, _HAS_NOT = (400, 422), (200, 404, 405, 501)  # a server that takes an empty request has no such route either
_DRAFTER = ("agentspec", "suffix")  # the drafter, and the method whose chains serve a latency goal first


class ServerDetector:
    """Tells what an upstream is, by the configuration or by asking its `/models`, and which routes it has besides those
    of chats and completions, by an empty request, which costs it nothing.

    If the upstream does not answer, the last result holds. Safe to use from several event loops.
    """

    def __init__(self, endpoint: Endpoint, settings: OpenAISettings) -> None:
        self._endpoint = endpoint
        self._kind: ServerKind | None = configured_kind(settings)
        self._until = 0.0 if self._kind is None else math.inf
        self._keeps_latency: bool | None = None
        self._look_at = 0.0  # when to ask for the drafter again
        self._routes: dict[str, tuple[bool, float]] = {}  # whether there is one, and until when that holds

    @property
    def known(self) -> ServerKind | None:
        """The last result, without asking."""
        return self._kind

    async def kind(self) -> ServerKind | None:
        """What it is; None if it has never answered. Asks it, for at most `LOOK_SECONDS`, if no result holds."""
        now = time.monotonic()
        if now < self._until:
            return self._kind
        if self._kind is not None:
            self._until = now + RETRY_SECONDS  # meanwhile other requests use the last result
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                found = await look(self._endpoint)
        except (UpstreamError, TimeoutError):
            self._until = time.monotonic() + RETRY_SECONDS
            return self._kind
        self._kind = found
        self._until = now + FRESH_SECONDS
        return self._kind

    async def is_vllm(self) -> bool:
        """Whether it is vLLM. One that has never answered counts as another, and gets no field it might refuse."""
        return await self.kind() == "vllm"

    async def keeps_latency(self) -> bool:
        """Whether its drafts serve latency goals first: our plug-in drafts in vLLM, as its metrics say. False for one
        that has not answered; asks it, for at most `LOOK_SECONDS`, if no result holds.
        """
        if not await self.is_vllm():
            return False
        if (now := time.monotonic()) >= self._look_at:
            if self._keeps_latency is not None:
                self._look_at = now + RETRY_SECONDS  # meanwhile other requests use the last result
            drafter = await read_drafter(self._endpoint, LOOK_SECONDS)
            self._look_at = time.monotonic() + (RETRY_SECONDS if drafter is None else FRESH_SECONDS)
            if drafter is not None:
                self._keeps_latency = (drafter.name, drafter.method) == _DRAFTER
        return bool(self._keeps_latency)

    async def has_route(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether `path` is there, asked with the client's key in `headers`. Missing while it is not known."""
        found, until = self._routes.get(path, (False, -math.inf))
        if time.monotonic() < until:
            return found
        status = await self._ask(path, headers)
        known = status in _HAS or status in _HAS_NOT
        found = status in _HAS if known else found
        self._routes[path] = (found, time.monotonic() + (ROUTE_SECONDS if known else ROUTE_RETRY_SECONDS))
        return found

    async def _ask(self, path: str, headers: Mapping[str, str]) -> int:
        """The status of an empty request; 0 without an answer."""
        account = {name: value for name, value in headers.items() if name.startswith(_ACCOUNT)}
        given = {**account, "content-type": "application/json"}
        sending = self._endpoint.send("POST", path, headers=given, body=b"{}", timeout=LOOK_SECONDS)
        try:
            async with sending as response:
                return response.status
        except UpstreamError:
            return 0


def configured_kind(settings: OpenAISettings) -> ServerKind | None:
    """What the settings say that the server is; None if it shall be asked."""
    if settings.server_kind == "auto":
        return None
    return settings.server_kind


async def look(endpoint: Endpoint) -> ServerKind:
    """What the server names as the owner of its models, or else whose metrics it publishes.

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
