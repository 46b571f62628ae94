"""`@step` labels model calls with their step and workflow, says how to serve them, and counts what each step costs."""

from agentspec.protocol.policy import StepPolicy
from agentspec.step.decorator import step
from agentspec.step.report import async_httpx_hooks, headers, httpx_hooks, report
from agentspec.step.scope import current_labels, current_model, current_policy, keep_labels, workflow

__all__ = [
    "StepPolicy",
    "async_httpx_hooks",
    "current_labels",
    "current_model",
    "current_policy",
    "headers",
    "httpx_hooks",
    "keep_labels",
    "report",
    "step",
    "workflow",
]
