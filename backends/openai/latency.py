"""Hands the time per token that an answer should keep to our drafter in a vLLM server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentspec.backends.openai.vllm import XARGS
from agentspec.types import check_latency_goal

GOAL = "latency_target_ms_per_token"
"""The field of a body that holds the milliseconds per token after the first."""
ARGUMENT = "agentspec_latency_ms_per_token"
"""Its name in `vllm_xargs`, which `backends/vllm/proposer.py` reads."""


def goal_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm_xargs` of a body with the fields `given`, with its latency goal; the client's own argument stays.

    Raises `InvalidRequestError` for a goal that is no number above 0.
    """
    goal, theirs = given[GOAL], given.get(XARGS) or {}
    check_latency_goal(goal)
    if not isinstance(theirs, Mapping) or ARGUMENT in theirs:
        return {}
    return {XARGS: {**theirs, ARGUMENT: float(goal)}}
