"""The row of Anthropic's API: requests read as chats, and answers written as messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentspec.backends.base import MESSAGES
from agentspec.errors import InvalidRequestError
from agentspec.protocol.anthropic.requests import parse_messages
from agentspec.protocol.anthropic.responses import MessagesWriter
from agentspec.protocol.errors import anthropic_error
from agentspec.protocol.requests import parse_chat
from agentspec.protocol.responses import ApiWriter
from agentspec.protocol.wire import named_event
from agentspec.proxy.api import Api, Fields, History
from agentspec.proxy.errors import ErrorResponse
from agentspec.proxy.forwarding import Inspector
from agentspec.proxy.request_context import RequestContext
from agentspec.reasoning.strategy import Strategy
from agentspec.types import GenerateRequest


class MessagesInspector(Inspector):
    """Follows a stream of the Messages API, which `message_stop` ends; `message_delta` has the counts so far."""

    telling = re.compile(rb'"(?:message_start|message_delta|message_stop|error)"')

    def __init__(self) -> None:
        super().__init__()
        self.counts["usage"] = {}

    def failure(self, error: ErrorResponse, request_id: str) -> bytes:
        return named_event("error", anthropic_error(error.body, error.status, request_id))

    def read_event(self, event: Mapping[str, Any]) -> None:
        kind, message = event.get("type"), event.get("message")
        self.done = self.done or kind == "message_stop"
        if kind == "error":
            self.error = self.error or event.get("error") or kind
        usage = event.get("usage") if kind == "message_delta" else isinstance(message, dict) and message.get("usage")
        if isinstance(usage, dict):
            self.counts["usage"] |= {name: count for name, count in usage.items() if count is not None}


def _parse(fields: Fields, context: RequestContext, history: History) -> tuple[Sequence[GenerateRequest], ApiWriter]:
    chat, asked = parse_messages(fields)
    request, _ = parse_chat(chat, max_messages=len(chat["messages"]))
    counted = context.stream and not isinstance(context.route.backend, Strategy)  # a stream begins with a count
    request = replace(request, return_prompt=counted, thinking_budget=asked.thinking_budget)
    return [request], MessagesWriter(request.model, asked)


def _translate(fields: Fields, context: RequestContext, history: History, templated: bool) -> tuple[Fields, ApiWriter]:
    chat, asked = parse_messages(fields, templated=templated)
    if asked.prefilled and not templated:
        message = "the last message must not be the assistant's: this upstream continues no message"
        raise InvalidRequestError(message, param="messages")
    return chat, MessagesWriter(fields["model"], asked)


ANTHROPIC = Api(MESSAGES, _parse, _translate, MessagesInspector)
