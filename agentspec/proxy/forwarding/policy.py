"""What an upstream makes of the policy and the switches that a client's headers ask for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from agentspec.backends.base import RESPONSES
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.fields import GOAL, PRIORITY, takes_switches
from agentspec.proxy.admission.auth import Caller

logger = logging.getLogger(__name__)


async def with_policy(
    backend: OpenAIBackend, path: str, fields: Mapping[str, Any], caller: Caller
) -> Mapping[str, Any]:
    """The `fields` of a body for `path` with what the `caller`'s policy says and the body does not: the priority, if
    the upstream schedules by it, and the latency goal, if its drafts serve one first.

    The headers go on as they are, since another gateway may follow them; what no other upstream does is logged once.
    """
    policy = caller.policy
    goal = policy.latency_ms_per_token
    heeded = {
        PRIORITY: policy.priority if backend.settings.priority != "off" else None,
        GOAL: goal if goal is not None and await backend.keeps_latency(path) else None,
    }
    told = bool(caller.off) and takes_switches(await backend.server_kind(), path)
    unheeded = {
        "deadline-s": policy.deadline_s,
        "latency-ms-per-token": goal if heeded[GOAL] is None else None,
        "priority": policy.priority if heeded[PRIORITY] is None else None,
        "strategy": policy.strategy,
        "speculation": None if caller.speculation or told else "off",
        "store": None if caller.store or told or path == RESPONSES else "off",  # a field of theirs says it
    }
    for name, value in unheeded.items():
        if value is not None:
            _say_once(str(backend.settings.url), name)
    added = {name: value for name, value in heeded.items() if value is not None and fields.get(name) is None}
    return {**fields, **added} if added else fields


@lru_cache(maxsize=1024)
def _say_once(upstream: str, name: str) -> None:
    logger.warning("upstream %s: only an agentspec gateway would follow x-agentspec-%s there", upstream, name)
