"""Upstreams that are vLLM servers: how one is recognised, and what requests to it carry beside OpenAI's fields."""

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
FRESH_SECONDS = 60.0  # for which an upstream is taken for what it was: servers are replaced
RETRY_SECONDS = 5.0
LOOK_SECONDS = 2.0
_OWNER = "vllm"


class VllmDetector:
    """Whether an upstream is a vLLM server: as configured, or found out by its `/models`.

    One that does not answer counts as what it was before, and where that is not known as another server: requests then
    carry nothing that it might refuse. Safe to use from several event loops.
    """

    def __init__(self, endpoint: Endpoint, choice: VllmChoice) -> None:
        self._endpoint = endpoint
        self._known = None if choice == "auto" else choice == "on"
        self._until = 0.0 if choice == "auto" else math.inf

    async def is_vllm(self) -> bool:
        """Waits for the upstream, at most `LOOK_SECONDS`, where that is not known or was learned too long ago."""
        now = time.monotonic()
        if self._known is not None and now < self._until:
            return self._known
        self._until = now + RETRY_SECONDS  # meanwhile other requests go by what was known
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                self._known = await says_vllm(self._endpoint)
            self._until = now + FRESH_SECONDS
        except (UpstreamError, TimeoutError):
            self._known = self._known or False
        return self._known


async def says_vllm(endpoint: Endpoint) -> bool:
    """Whether the server calls itself the owner of its models, or else publishes vLLM's metrics.

    Models are listed by any such server. Only one that refuses it, for want of a key, is asked for metrics, which
    vLLM shows without one. Raises `UpstreamError` where neither is answered.
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
    """The fields that carry `labels` to our drafter in a vLLM server, in a body which has the fields `given`.

    The client's own arguments stay, but for those of our names that `labels` has a value for. Arguments that are not an
    object are left for the server to refuse.
    """
    named = {field.name: getattr(labels, field.name) for field in fields(labels)}
    ours = {f"agentspec_{name}": value for name, value in named.items() if value}
    theirs = given.get(XARGS) or {}
    return {XARGS: {**theirs, **ours}} if ours and isinstance(theirs, Mapping) else {}


def token_id_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What to set for the answer to carry token ids. Nothing with `echo`, whose text they would take the place of."""
    return {} if "return_token_ids" in given or given.get("echo") else {"return_token_ids": True}


@dataclass(frozen=True, slots=True)
class VllmReport:
    """What a vLLM server shows of itself. `labels`: it takes `vllm_xargs`. `metrics` is None where it shows none."""

    version: str | None = None
    labels: bool = False
    metrics: ServerMetrics | None = None


async def read_version(endpoint: Endpoint, timeout: float) -> str | None:
    """None where the server does not show it."""
    try:
        answer = json.loads(await endpoint.fetch("GET", "/version", above=True, timeout=timeout))
    except (UpstreamError, ValueError, RecursionError):
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None


async def read_metrics(endpoint: Endpoint, timeout: float) -> ServerMetrics | None:
    """None where the server does not answer."""
    try:
        async with asyncio.timeout(timeout):
            return await fetch_metrics(endpoint, timeout)
    except (UpstreamError, TimeoutError):
        return None
