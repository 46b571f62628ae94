"""`@step` labels model calls with their step and workflow, and counts what each step costs."""

from agentspec.step.decorator import (
    async_httpx_hooks,
    current_labels,
    current_model,
    headers,
    httpx_hooks,
    report,
    step,
    workflow,
)

__all__ = [
    "async_httpx_hooks",
    "current_labels",
    "current_model",
    "headers",
    "httpx_hooks",
    "report",
    "step",
    "workflow",
]
