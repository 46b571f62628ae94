"""Reads the drafter, its counts and the load of a server from its Prometheus metrics."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agentspec.backends.http import MAX_LIST_BYTES, Endpoint

DRAFTER_METRIC = "agentspec_vllm_drafter_info"  # published by our plug-in in the server
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.ASCII)
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*+)"')


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A vLLM server's drafter: "agentspec", "arctic", a method of vLLM, or "none"; `version` is the server's agentspec.

    All are "" where no plug-in of ours names the drafter.
    """

    name: str = ""
    method: str = ""
    version: str = ""


async def read_drafter(endpoint: Endpoint, timeout: float) -> DrafterInfo:
    """The drafter in the server's metrics. Raises `UpstreamError`."""
    content = await endpoint.fetch("GET", "/metrics", above=True, timeout=timeout, limit=MAX_LIST_BYTES)
    return parse_drafter(content.decode("utf-8", "replace"))


def parse_drafter(text: str) -> DrafterInfo:
    """The drafter in metrics of Prometheus' text format."""
    for _, labels, _ in samples(text, (DRAFTER_METRIC,)):
        return DrafterInfo(labels.get("drafter", ""), labels.get("method", ""), labels.get("version", ""))
    return DrafterInfo()


def samples(text: str, beginnings: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each line with one of these beginnings. Lines without a finite value are skipped."""
    for line in text.split("\n"):
        sample = _SAMPLE.match(line) if line.startswith(beginnings) else None
        if sample is not None and math.isfinite(value := _number(sample[3])):
            yield sample[1], dict(_LABEL.findall(sample[2] or "")), value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_DRAFTED, _ACCEPTED = (f"agentspec_drafter_{kind}_tokens_total" for kind in ("draft", "accepted"))
NAMES = (*_RUNNING, *_WAITING, *_KV_USE, _DRAFTED, _ACCEPTED)
_SOURCES = ("cache", "prediction")  # that our plug-ins name


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests being computed and queued, those of other gateways included; the share of the KV cache in use; the
    tokens that our plug-in in the server has drafted, and those accepted, by source.
    """

    running: int
    waiting: int
    kv_use: float
    drafted: Mapping[str, int] = field(default_factory=dict)
    accepted: Mapping[str, int] = field(default_factory=dict)


def parse_load(text: str) -> ServerLoad | None:
    """The load in metrics of Prometheus' text format, of all engines of the server; None if they do not show it.

    Counts are added up. Of KV caches the fullest counts: its engine is the one that preempts.
    """
    running, waiting, kv_use, found = 0.0, 0.0, 0.0, False
    tokens: dict[str, Counter[str]] = {_DRAFTED: Counter(), _ACCEPTED: Counter()}
    for name, labels, value in samples(text, NAMES):
        if name in _RUNNING:
            running, found = running + value, True
        elif name in _WAITING:
            waiting, found = waiting + value, True
        elif name in _KV_USE:
            kv_use, found = max(kv_use, value), True
        elif name in tokens and (source := labels.get("source")) in _SOURCES:
            tokens[name][source] += max(0, int(value))
    counts = max(0, int(running)), max(0, int(waiting)), min(max(kv_use, 0.0), 1.0)
    return ServerLoad(*counts, *map(dict, tokens.values())) if found else None
