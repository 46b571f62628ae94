"""Lets the cache behind a drafter learn a call that no request made."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentspec.backends.engine_plugin.request_state import RequestInfo
from agentspec.types import Labels

FLUSH_SECONDS = 60.0


def learn_call(ours: Any, call: dict[str, Any]) -> int:
    """Let a `ServerDrafter` or a `PassageRetriever` learn one call, as if a request had made it."""
    prompt, answer = (np.array(call[part], dtype=np.int32) for part in ("prompt", "response"))
    request = ours.begin(prompt, RequestInfo(Labels(call["session"]), max_tokens=len(answer)))
    if hasattr(ours, "record"):
        ours.record(request, answer)
    else:
        ours.advance([(request, answer)])
    ours.end(request)
    if not ours.flush(FLUSH_SECONDS):
        raise RuntimeError(f"the cache did not take a call in within {FLUSH_SECONDS:g} s")
    return 1
