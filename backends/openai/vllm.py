"""Recognises upstreams that are vLLM servers, and makes the fields that requests to them carry besides OpenAI's."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from agentspec.backends.http import Endpoint, decode_json
from agentspec.backends.openai.vllm_metrics import ServerMetrics, fetch_metrics
from agentspec.backends.settings import VllmChoice
from agentspec.errors import UpstreamError, UpstreamStatusError
from agentspec.types import Labels

XARGS = "vllm_xargs"
FRESH_SECONDS = 60.0  # how long a detection result holds: another server may replace the upstream
RETRY_SECONDS = 5.0
LOOK_SECONDS = 2.0
_OWNER = "vllm"


class VllmDetector:
    """Tells whether an upstream is a vLLM server: by the configuration, or by asking its `/models`.

    If the upstream does not answer, the last result holds; if there is none, the upstream counts as another server, so
    that requests carry no field that it might refuse. Safe to use from several event loops.
    """

    def __init__(self, endpoint: Endpoint, choice: VllmChoice) -> None:
        self._endpoint = endpoint
        self._known = None if choice == "auto" else choice == "on"
        self._until = 0.0 if choice == "auto" else math.inf

    async def is_vllm(self) -> bool:
        """Whether it is vLLM. Asks the upstream, for at most `LOOK_SECONDS`, if there is no result or it is too old."""
        now = time.monotonic()
        if self._known is not None and now < self._until:
            return self._known
        self._until = now + RETRY_SECONDS  # meanwhile other requests use the last result
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                self._known = await says_vllm(self._endpoint)
            self._until = now + FRESH_SECONDS
        except (UpstreamError, TimeoutError):
            self._known = self._known or False
        return self._known


async def says_vllm(endpoint: Endpoint) -> bool:
    """Whether the server names vLLM as the owner of its models, or else publishes vLLM's metrics.

    The metrics are requested only if the server refuses to list its models, because the key is missing: vLLM shows
    metrics without a key. Raises `UpstreamError` if the server answers neither.
    """
    try:
        return owns_models(await list_models(endpoint, LOOK_SECONDS))
    except UpstreamStatusError:
        return (await fetch_metrics(endpoint, LOOK_SECONDS)).published


async def list_models(endpoint: Endpoint, timeout: float) -> list[dict[str, Any]]:
    """The entries of `/models` that are objects. Raises `UpstreamError`."""
    answer = decode_json(await endpoint.fetch("GET", "/models", timeout=timeout), endpoint.name)
    listed = answer.get("data") if isinstance(answer, dict) else None
    return [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []


def owns_models(listed: list[dict[str, Any]]) -> bool:
    return any(model.get("owned_by") == _OWNER for model in listed)


def label_fields(labels: Labels, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that carry `labels` to our drafter in a vLLM server, in a body that already has the fields `given`.

    The client's own `vllm_xargs` stay, except the names that `labels` sets. If the client's are not an object, they are
    left for the server to refuse.
    """
    named = {field.name: getattr(labels, field.name) for field in fields(labels)}
    ours = {f"agentspec_{name}": value for name, value in named.items() if value}
    theirs = given.get(XARGS) or {}
    return {XARGS: {**theirs, **ours}} if ours and isinstance(theirs, Mapping) else {}


def token_id_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that ask for token ids in the answer. Empty with `echo`, since token ids would replace its text."""
    return {} if "return_token_ids" in given or given.get("echo") else {"return_token_ids": True}


@dataclass(frozen=True, slots=True)
class VllmReport:
    """A vLLM server's version, whether it accepts `vllm_xargs` (`labels`), and its metrics, None if it shows none."""

    version: str | None = None
    labels: bool = False
    metrics: ServerMetrics | None = None


async def read_version(endpoint: Endpoint, timeout: float) -> str | None:
    """The server's vLLM version; None if the server does not tell it."""
    try:
        answer = json.loads(await endpoint.fetch("GET", "/version", above=True, timeout=timeout))
    except (UpstreamError, ValueError, RecursionError):
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None


async def read_metrics(endpoint: Endpoint, timeout: float) -> ServerMetrics | None:
    """The server's metrics; None if it does not answer in time."""
    try:
        async with asyncio.timeout(timeout):
            return await fetch_metrics(endpoint, timeout)
    except (UpstreamError, TimeoutError):
        return None
