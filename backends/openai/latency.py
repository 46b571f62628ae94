"""Hands the time per token that an answer should keep to our drafter in a vLLM server, if the server runs it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from agentspec.backends.http import Endpoint
from agentspec.backends.openai.server_kind import FRESH_SECONDS, LOOK_SECONDS, RETRY_SECONDS, ServerDetector
from agentspec.backends.openai.vllm import XARGS, read_metrics
from agentspec.types import check_latency_goal

GOAL = "latency_target_ms_per_token"
"""The field of a body that holds the milliseconds per token after the first."""
ARGUMENT = "agentspec_latency_ms_per_token"
"""Its name in `vllm_xargs`, which `backends/vllm/proposer.py` reads."""
_DRAFTER = ("agentspec", "suffix")  # the drafter, and the method whose chains it allots


class GoalDetector:
    """Tells whether a server's drafts serve latency goals first: our plug-in drafts there, as its metrics say.

    If the metrics do not answer, the last result holds. Safe to use from several event loops.
    """

    def __init__(self, endpoint: Endpoint, server: ServerDetector) -> None:
        self._endpoint = endpoint
        self._server = server
        self._keeps: bool | None = None
        self._until = 0.0

    async def keeps(self) -> bool:
        """Asks the server, for at most `LOOK_SECONDS`, if no result holds; False for one that has not answered."""
        if not await self._server.is_vllm():
            return False
        if (now := time.monotonic()) >= self._until:
            if self._keeps is not None:
                self._until = now + RETRY_SECONDS  # meanwhile other requests use the last result
            await self._look()
        return bool(self._keeps)

    async def _look(self) -> None:
        metrics = await read_metrics(self._endpoint, LOOK_SECONDS)
        self._until = time.monotonic() + (RETRY_SECONDS if metrics is None else FRESH_SECONDS)
        if metrics is not None:
            drafter = metrics.drafter
            self._keeps = drafter is not None and (drafter.name, drafter.method) == _DRAFTER


def goal_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm_xargs` of a body with the fields `given`, with its latency goal; the client's own argument stays.

    Raises `InvalidRequestError` for a goal that is no number above 0.
    """
    goal, theirs = given[GOAL], given.get(XARGS) or {}
    check_latency_goal(goal)
    if not isinstance(theirs, Mapping) or ARGUMENT in theirs:
        return {}
    return {XARGS: {**theirs, ARGUMENT: float(goal)}}
