"""How busy a server is, by the metrics that vLLM and SGLang publish."""

from __future__ import annotations

from dataclasses import dataclass

from agentspec.backends.openai.vllm_metrics import samples

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
