"""The row of the Responses API; see `protocol/openai_responses/` for how requests and answers correspond to chats."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentspec.backends.base import RESPONSES
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.cache.stored import StoredResponse
from agentspec.errors import InvalidRequestError, OverloadedError
from agentspec.protocol.errors import without_account
from agentspec.protocol.messages import without_past_thoughts
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.request import ResponsesRequest, parse_responses
from agentspec.protocol.requests import MAX_MESSAGES, parse_chat
from agentspec.protocol.responses import obfuscated
from agentspec.protocol.wire import encode, named_event
from agentspec.proxy.api import Api, ApiWriter, Fields, History
from agentspec.proxy.body.upstream_fields import UpstreamFields
from agentspec.proxy.errors import error_response
from agentspec.proxy.request_context import RequestContext
from agentspec.proxy.responses.stored import ResponsesInspector
from agentspec.types import Delta, GenerateRequest

UNENFORCED = "x-agentspec-unenforced"
"""Header that names fields which only the prompt asks for: forms of tools' inputs that nothing enforces."""


class ResponsesWriter(ApiWriter):
    holds_answer = True

    def __init__(self, request: ResponsesRequest, *, stored: bool) -> None:
        self.headers = {UNENFORCED: ", ".join(request.unenforced)} if request.unenforced else {}
        self._request = request
        self._events = EventWriter(request, stored=stored)
        self._encode = obfuscated if request.obfuscation else encode
        self._begun = False

    def add(self, delta: Delta) -> None:
        for _ in self._events.write(delta):
            pass

    def body(self) -> dict[str, Any]:
        return self._events.response

    def events(self, delta: Delta) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield from self._encoded(self._events.begin())
        yield from self._encoded(self._events.write(delta))

    def close(self) -> Iterable[bytes]:
        return self._encoded(self._events.close())

    def to_store(self, context: RequestContext, seconds: float) -> StoredResponse | None:
        if not self._events.stored:
            return None
        now = time.time()
        return StoredResponse(
            id=self._events.id,
            tenant=context.tenant,
            created_at=now,
            session=context.labels.session,
            previous=self._request.previous,
            response=self._events.response,
            items=self._request.items,
            begun=now - seconds,
        )

    def stored(self, done: bool) -> None:
        self._events.stored = done

    def last(self) -> Iterable[bytes]:
        return self._encoded([self._events.last()])

    def failure(self, error: Exception, request_id: str) -> Iterable[bytes]:
        return self._encoded([self._events.fail(*failure(error, request_id))])

    def own_name(self, param: str) -> str:
        return self._request.own_name(param)

    def _encoded(self, events: Iterable[dict[str, Any]]) -> Iterator[bytes]:
        for one in events:
            yield named_event(one["type"], self._encode(one))


def failure(error: Exception, request_id: str) -> tuple[str, str]:
    """OpenAI's code for an error inside a response, and its message."""
    code = "server_error"
    if isinstance(error, OverloadedError):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequestError):
        code = "invalid_prompt"
    body = json.loads(without_account(error_response(error, request_id).body))
    return code, str(body["error"]["message"])


def _read(fields: Fields, history: History) -> ResponsesRequest:
    request = parse_responses(fields)
    return request if request.previous is None else request.continuing(history)


def _writer(request: ResponsesRequest, context: RequestContext) -> ApiWriter:
    return ResponsesWriter(request, stored=request.store and "store" not in context.off)


def _parse(fields: Fields, context: RequestContext, history: History) -> tuple[Sequence[GenerateRequest], ApiWriter]:
    request = _read(fields, history)
    chat = {**request.chat, "messages": request.messages(history)}
    try:
        parsed, _ = parse_chat(chat)
    except InvalidRequestError as error:
        error.param = error.param and request.own_name(error.param)
        raise
    return [parsed], _writer(request, context)


def _translate(fields: Fields, context: RequestContext, history: History, templated: bool) -> tuple[Fields, ApiWriter]:
    """The request as a chat. Only servers that apply a chat template take thoughts from before the tool loop."""
    request = _read(fields, history)
    _check_history(history, context.upstream)
    messages = request.messages(history) if templated else without_past_thoughts(request.messages(history))
    if len(messages) > MAX_MESSAGES:
        message = f"the conversation has more than {MAX_MESSAGES} messages"
        raise InvalidRequestError(message, param="input")
    return {**request.chat, "messages": messages}, _writer(request, context)


def _check_history(history: History, backend: OpenAIBackend) -> None:
    """Raise `InvalidRequestError` for what this upstream may not get, though the one before it may have got it."""
    try:
        UpstreamFields(backend.settings).check({"input": history}, RESPONSES)
    except InvalidRequestError as error:
        message = f"an earlier response: {error.message}"
        raise InvalidRequestError(message, param="previous_response_id") from None


OPENAI_RESPONSES = Api(RESPONSES, _parse, _translate, ResponsesInspector, keeps_answers=True)
