"""Tells whoever reads the server's metrics which drafter it uses: `agentspec_vllm_drafter_info`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from prometheus_client import Gauge

NAME = "agentspec_vllm_drafter_info"
OURS, ARCTIC, NONE = "agentspec", "arctic", "none"


def drafter_of(speculative: Any, *, took_over: bool) -> str:
    """Who drafts with this `SpeculativeConfig` (None without one); `took_over`: the suffix method is ours here."""
    if speculative is None:
        return NONE
    if speculative.method == "suffix":
        return OURS if took_over else ARCTIC
    return str(speculative.method)


def publish(speculative: Any, *, took_over: bool) -> None:
    """Put it among the metrics of this process. Idempotent."""
    method = "" if speculative is None else str(speculative.method)
    _gauge().labels(drafter_of(speculative, took_over=took_over), method, version("agentspec")).set(1)


def publish_with_metrics(*, took_over: bool) -> None:
    """Make vLLM's own metrics bring it along, in the process that serves them and only where it publishes any."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger  # pyright: ignore[reportMissingImports]

    original = PrometheusStatLogger.log_engine_initialized

    def log_engine_initialized(self: Any) -> None:
        original(self)
        publish(self.vllm_config.speculative_config, took_over=took_over)

    PrometheusStatLogger.log_engine_initialized = log_engine_initialized


@cache
def _gauge() -> Gauge:
    """One that is always 1, as vLLM's own: what it tells is in its labels. Processes of one server agree on it."""
    labels = ("drafter", "method", "version")
    return Gauge(NAME, "Who drafts for this server", labels, multiprocess_mode="mostrecent")
