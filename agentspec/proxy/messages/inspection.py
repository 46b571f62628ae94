"""Reads from an upstream's stream of messages what the gateway must know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agentspec.protocol.usage import read_usage
from agentspec.proxy.errors import anthropic_error_event
from agentspec.proxy.forwarding.inspection import EventInspector
from agentspec.types import Delta


class MessagesInspector(EventInspector):
    """Follows a stream of the Messages API, which `message_stop` ends; `message_delta` has the counts so far."""

    telling = re.compile(rb'"(?:message_start|message_delta|message_stop|error)"')

    def __init__(self) -> None:
        super().__init__()
        self._usage: dict[str, Any] = {}

    def failure(self, error: Exception, request_id: str) -> bytes:
        return anthropic_error_event(error, request_id)

    @property
    def counts(self) -> Delta:
        with suppress(AttributeError, TypeError, ValueError, OverflowError):
            return Delta(usage=read_usage(self._usage) if self._usage else None)
        return Delta()

    def read_event(self, event: Mapping[str, Any]) -> None:
        kind, message = event.get("type"), event.get("message")
        self.done = self.done or kind == "message_stop"
        if kind == "error":
            self.error = self.error or event.get("error") or kind
        usage = event.get("usage") if kind == "message_delta" else isinstance(message, dict) and message.get("usage")
        if isinstance(usage, dict):
            self._usage |= {name: count for name, count in usage.items() if count is not None}
