"""Reads the draft counts of a vLLM server from its Prometheus metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass

from agentspec.backends.http import MAX_LIST_BYTES, Endpoint
from agentspec.errors import UpstreamError

DRAFTER_METRIC = "agentspec_vllm_drafter_info"  # published by our plug-in in the server
_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.ASCII)
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*+)"')


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Totals since the server started, summed over its models and engines."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """The drafter `name`: "agentspec", "arctic", a method of vLLM, or "none"; `version` is the server's agentspec."""

    name: str
    method: str
    version: str


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """`published`: the server shows vLLM's metrics; only then do missing values mean anything.

    `drafts` is None if the server does not draft, `drafter` is None if no plug-in of ours names the drafter.
    """

    published: bool = False
    drafts: DraftCounts | None = None
    drafter: DrafterInfo | None = None


async def read_metrics(endpoint: Endpoint, timeout: float) -> ServerMetrics | None:
    """The server's metrics; None if it does not answer in `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            content = await endpoint.fetch("GET", "/metrics", above=True, timeout=timeout, limit=MAX_LIST_BYTES)
    except (UpstreamError, TimeoutError):
        return None
    return parse_metrics(content.decode("utf-8", "replace"))


def parse_metrics(text: str) -> ServerMetrics:
    """Parse Prometheus' text format. Lines in another format and counters without a number are skipped."""
    totals: dict[str, float] = {}
    drafter, published = None, False
    for name, labels, value in samples(text, ("vllm:", DRAFTER_METRIC)):
        published = published or name.startswith("vllm:")
        if name in _COUNTERS:
            totals[_COUNTERS[name]] = totals.get(_COUNTERS[name], 0.0) + value
        elif name == DRAFTER_METRIC:
            drafter = DrafterInfo(labels.get("drafter", ""), labels.get("method", ""), labels.get("version", ""))
    return ServerMetrics(published, DraftCounts(**totals) if totals else None, drafter)


def samples(text: str, beginnings: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each line with one of these beginnings. Lines without a finite value are skipped."""
    for line in text.split("\n"):
        sample = _SAMPLE.match(line) if line.startswith(beginnings) else None
        if sample is not None and (value := _finite(sample[3])) is not None:
            yield sample[1], dict(_LABEL.findall(sample[2] or "")), value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
NAMES = (*_RUNNING, *_WAITING, *_KV_USE)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests being computed and queued, those of other gateways included; the share of the KV cache in use."""

    running: int
    waiting: int
    kv_use: float


def parse_load(text: str) -> ServerLoad | None:
    """The load in metrics of Prometheus' text format, of all engines of the server; None if it tells none.

    Counts are added up. Of KV caches the fullest counts: its engine is the one that preempts.
    """
    running, waiting, kv_use, found = 0.0, 0.0, 0.0, False
    for name, _, value in samples(text, NAMES):
        if name in _RUNNING:
            running, found = running + value, True
        elif name in _WAITING:
            waiting, found = waiting + value, True
        elif name in _KV_USE:
            kv_use, found = max(kv_use, value), True
    return ServerLoad(max(0, int(running)), max(0, int(waiting)), min(max(kv_use, 0.0), 1.0)) if found else None
