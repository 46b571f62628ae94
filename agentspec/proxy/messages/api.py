"""The row of Anthropic's API: requests read as chats, answers written as messages, and tokens counted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from starlette.exceptions import HTTPException

from agentspec.backends.base import MESSAGES, Backend, Tokenization
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.errors import InvalidRequestError, UpstreamStatusError
from agentspec.protocol.anthropic.requests import MessagesRequest, parse_messages
from agentspec.protocol.anthropic.responses import MessagesWriter
from agentspec.protocol.requests import parse_chat
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.answering import check_roles, require_route
from agentspec.proxy.api import Api, ApiWriter, Fields, History, json_response, respond
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.completions.translation import TEMPLATED
from agentspec.proxy.endpoint import GenerationEndpoint
from agentspec.proxy.errors import anthropic_error_event
from agentspec.proxy.forwarding import Inspector
from agentspec.proxy.request_context import RequestContext
from agentspec.proxy.routes.tokenization import check_characters
from agentspec.reasoning.strategy import Strategy
from agentspec.runtime import Route
from agentspec.types import GenerateRequest


class MessagesInspector(Inspector):
    """Follows a stream of the Messages API, which `message_stop` ends; `message_delta` has the counts so far."""

    telling = re.compile(rb'"(?:message_start|message_delta|message_stop|error)"')

    def __init__(self) -> None:
        super().__init__()
        self.counts["usage"] = {}

    def failure(self, error: Exception, request_id: str) -> bytes:
        return anthropic_error_event(error, request_id)

    def read_event(self, event: Mapping[str, Any]) -> None:
        kind, message = event.get("type"), event.get("message")
        self.done = self.done or kind == "message_stop"
        if kind == "error":
            self.error = self.error or event.get("error") or kind
        usage = event.get("usage") if kind == "message_delta" else isinstance(message, dict) and message.get("usage")
        if isinstance(usage, dict):
            self.counts["usage"] |= {name: count for name, count in usage.items() if count is not None}


class _Writer(ApiWriter):
    """Anthropic's events, of which an error is the last."""

    named = True
    end = b""

    def error_event(self, error: Exception, request_id: str) -> bytes:
        return anthropic_error_event(error, request_id)


def _writer(fields: Fields, request: MessagesRequest) -> ApiWriter:
    return _Writer(MessagesWriter(fields["model"], request.bare()))


def _parse(fields: Fields, context: RequestContext, history: History) -> tuple[Sequence[GenerateRequest], ApiWriter]:
    parsed = parse_messages(fields)
    request = chat_of(parsed)
    if parsed.stream and not isinstance(context.route.backend, Strategy):  # its prompt is counted first
        request = replace(request, return_prompt=True)
    return [replace(request, thinking_budget=parsed.thinking_budget)], _writer(fields, parsed)


def chat_of(parsed: MessagesRequest) -> GenerateRequest:
    return parse_chat(parsed.chat, max_messages=len(parsed.chat["messages"]))[0]


def read_for_upstream(fields: Fields, templated: bool, *, count: bool = False) -> MessagesRequest:
    """The request as a chat for an upstream. With `count` it is only counted, and may end with the assistant."""
    parsed = parse_messages(fields, templated=templated, count=count)
    if parsed.prefilled and not (templated or count):
        message = "the last message must not be the assistant's: this upstream continues no message"
        raise InvalidRequestError(message, param="messages")
    return parsed


def _translate(fields: Fields, context: RequestContext, history: History, templated: bool) -> tuple[Fields, ApiWriter]:
    parsed = read_for_upstream(fields, templated)
    return parsed.chat, _writer(fields, parsed)


ANTHROPIC = Api(MESSAGES, _parse, _translate, MessagesInspector)


@dataclass(slots=True)
class CountTokensEndpoint(GenerationEndpoint):
    """Counts a prompt's tokens; a strategy's by its base model. An upstream with the route counts itself."""

    generates: ClassVar[bool] = False

    async def respond(self, context: RequestContext, body: RequestBody, answer: RequestAnswer) -> None:
        backend = context.route.backend
        if isinstance(backend, OpenAIBackend):
            await self.check(context, body)
            if await self.is_forwarded(context, answer):
                await self.pass_on(context, body, answer, MessagesInspector())
                return
        async with context.deadline.limit():
            count = await self._count(context, body, answer, backend)
        await respond(answer, json_response({"input_tokens": count}))

    async def _count(self, context: RequestContext, body: RequestBody, answer: RequestAnswer, backend: Backend) -> int:
        if isinstance(backend, OpenAIBackend):
            templated = await backend.server_kind() in TEMPLATED
            parsed = await body.work(lambda: read_for_upstream(body.fields, templated, count=True))
            return await _of_server(backend, context.route.upstream_model, parsed)
        require_route(self.api, backend, answer)
        parsed = await body.work(self._read_here, body.fields, backend)
        base = await self._base_of(body.fields["model"])
        if isinstance(base.backend, OpenAIBackend):
            return await _of_server(base.backend, base.upstream_model, parsed)
        if not isinstance(base.backend, Tokenization):
            raise HTTPException(404)
        request = await body.work(chat_of, parsed)
        # Tools that the model's template cannot take are refused as for an answer.
        text = await base.backend.render(request.messages or (), request.tools, request.template_arguments)
        check_characters(len(text), base.backend.capabilities.context_length, "messages")
        return len(await base.backend.tokenize(text))

    def _read_here(self, fields: Mapping[str, Any], backend: Backend) -> MessagesRequest:
        check_roles(fields, self.path, backend, self.services.settings)
        return parse_messages(fields, count=True)

    async def _base_of(self, model: str) -> Route:
        """The route of a plain model, or of a strategy's base model; of a pool, that of one of its servers."""
        route = self.services.runtime.base_of(model)
        if not isinstance(route.backend, PoolBackend):
            return route
        backend, known = await route.backend.any_server()
        return Route(route.backend_name, backend, known or route.upstream_model)


async def _of_server(backend: OpenAIBackend, model: str, parsed: MessagesRequest) -> int:
    """By the tokenizer endpoints of an upstream, as vLLM has them. Raises 404 for one without."""
    chat = parsed.chat
    arguments = (chat["messages"], chat.get("tools") or (), chat.get("chat_template_kwargs") or {})
    try:
        return len(await backend.tokenizer_of(model).rendered_ids(*arguments))
    except UpstreamStatusError as error:
        if error.status in (404, 405, 501):
            raise HTTPException(404) from None
        raise
