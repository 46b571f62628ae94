"""The Prometheus metric `agentspec_vllm_drafter_info`, which names the drafter that a vLLM server uses."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Gauge

from agentspec.backends.vllm.runner_v2.plugin import METHODS
from agentspec.version import __version__

NAME = "agentspec_vllm_drafter_info"
OURS, ARCTIC, NONE = "agentspec", "arctic", "none"


def drafter_of(speculative: Any, *, took_over: bool, took_over_v2: bool = False) -> str:
    """The drafter's name by vLLM's `SpeculativeConfig`, if any.

    `took_over`: our drafter replaced the suffix method; `took_over_v2`: ours replaced the n-gram method of the model
    runner in use.
    """
    if speculative is None:
        return NONE
    if took_over_v2 and speculative.method in METHODS:
        return OURS
    if speculative.method == "suffix":
        return OURS if took_over else ARCTIC
    return str(speculative.method)


def publish(speculative: Any, *, took_over: bool, took_over_v2: bool = False) -> None:
    """Set the drafter metric in this process. Idempotent."""
    method = "" if speculative is None else str(speculative.method)
    drafter = drafter_of(speculative, took_over=took_over, took_over_v2=took_over_v2)
    _gauge().labels(drafter, method, __version__).set(1)


def publish_with_metrics(*, took_over: bool, took_over_v2: bool = False) -> None:
    """Make vLLM publish the drafter metric with its own metrics, in the process that serves them, if it serves any."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger  # pyright: ignore[reportMissingImports]

    original = PrometheusStatLogger.log_engine_initialized

    def log_engine_initialized(self: Any) -> None:
        original(self)
        config = self.vllm_config
        in_use = took_over_v2 and config.use_v2_model_runner
        publish(config.speculative_config, took_over=took_over, took_over_v2=in_use)

    PrometheusStatLogger.log_engine_initialized = log_engine_initialized


@cache
def _gauge() -> Gauge:
    """An info metric: always 1, with the information in its labels, the same in all processes of a server."""
    labels = ("drafter", "method", "version")
    return Gauge(NAME, "Who drafts for this server", labels, multiprocess_mode="mostrecent")
