"""The fields that requests to a vLLM server carry besides OpenAI's, and what such a server tells about itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from agentspec.backends.http import Endpoint
from agentspec.backends.openai.vllm_metrics import ServerMetrics, fetch_metrics
from agentspec.errors import UpstreamError
from agentspec.types import Labels

XARGS = "vllm_xargs"


def label_fields(labels: Labels, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that carry `labels` to our drafter in a vLLM server, in a body that already has the fields `given`.

    The client's own `vllm_xargs` stay, except the names that `labels` sets. If the client's are not an object, they are
    left for the server to refuse.
    """
    named = {field.name: getattr(labels, field.name) for field in fields(labels)}
    ours = {f"agentspec_{name}": value for name, value in named.items() if value}
    theirs = given.get(XARGS) or {}
    return {XARGS: {**theirs, **ours}} if ours and isinstance(theirs, Mapping) else {}


def labels_in(given: Mapping[str, Any]) -> Labels:
    """The labels that a body with the fields `given` carries already."""
    theirs = given.get(XARGS)
    if not isinstance(theirs, Mapping):
        return Labels()
    found = {field.name: theirs.get(f"agentspec_{field.name}") for field in fields(Labels)}
    return Labels(**{name: str(value) for name, value in found.items() if value})


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
