"""What an upstream makes of the policy that a client's headers ask for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from agentspec.backends.base import Forwards
from agentspec.backends.openai.hints import PRIORITY
from agentspec.protocol.headers import StepPolicy

logger = logging.getLogger(__name__)


def with_policy(backend: Forwards, fields: Mapping[str, Any], policy: StepPolicy) -> Mapping[str, Any]:
    """The body's `fields` with the priority of `policy`, if the upstream schedules by it and the body has none.

    The headers go on as they are, since another gateway may follow them; what no other upstream does is logged once.
    """
    schedules = backend.settings.priority != "off"
    unheeded = {
        "deadline-s": policy.deadline_s,
        "latency-ms-per-token": policy.latency_ms_per_token,
        "priority": None if schedules else policy.priority,
        "strategy": policy.strategy,
    }
    for name, value in unheeded.items():
        if value is not None:
            _say_once(str(backend.settings.url), name)
    if policy.priority is None or not schedules or fields.get(PRIORITY) is not None:
        return fields
    return {**fields, PRIORITY: policy.priority}


@lru_cache(maxsize=1024)
def _say_once(upstream: str, name: str) -> None:
    logger.warning("upstream %s: only an agentspec gateway would follow x-agentspec-%s there", upstream, name)
