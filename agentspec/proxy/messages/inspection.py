"""Reads from an upstream's stream of messages what the gateway must know."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from agentspec.errors import UpstreamError
from agentspec.protocol.sse import MAX_HELD, SseDecoder
from agentspec.protocol.usage import read_usage
from agentspec.proxy.errors import anthropic_error_event
from agentspec.types import Delta

# Text of an answer is JSON too: its quotes are escaped and match nothing.
_TELLING = re.compile(rb'"(?:message_start|message_delta|message_stop|error)"')


class MessagesInspector:
    """Follows a stream of the Messages API, which `message_stop` ends; `message_delta` has the counts so far."""

    def __init__(self) -> None:
        self.done = False
        self.error: Any = None
        self._usage: dict[str, Any] = {}

    def failure(self, error: Exception, request_id: str) -> bytes:
        return anthropic_error_event(error, request_id)

    @property
    def finished(self) -> bool:
        return self.done or self.error is not None

    @property
    def counts(self) -> Delta:
        with suppress(AttributeError, TypeError, ValueError, OverflowError):
            return Delta(usage=read_usage(self._usage) if self._usage else None)
        return Delta()

    def read(self, events: bytes) -> None:
        if _TELLING.search(events) is None:
            return
        with suppress(UpstreamError):
            for data in SseDecoder(max_event_bytes=2 * MAX_HELD).feed(events):
                with suppress(ValueError, RecursionError):
                    self._read_event(json.loads(data))

    def _read_event(self, event: Any) -> None:
        if not isinstance(event, dict):
            return
        kind, message = event.get("type"), event.get("message")
        self.done = self.done or kind == "message_stop"
        if kind == "error":
            self.error = self.error or event.get("error") or kind
        usage = event.get("usage") if kind == "message_delta" else isinstance(message, dict) and message.get("usage")
        if isinstance(usage, dict):
            self._usage |= {name: count for name, count in usage.items() if count is not None}
