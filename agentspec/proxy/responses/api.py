"""The row of the Responses API; see `protocol/openai_responses/` for how requests and answers correspond to chats."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from agentspec.backends.base import RESPONSES
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.cache.stored import StoredResponse
from agentspec.errors import InvalidRequestError, OverloadedError
from agentspec.protocol.errors import without_account
from agentspec.protocol.messages import without_past_thoughts
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.items import compaction
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

Write = Callable[[ResponsesRequest, RequestContext, History], ApiWriter]
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


def _writer(request: ResponsesRequest, context: RequestContext, history: History) -> ApiWriter:
    return ResponsesWriter(request, stored=request.store and "store" not in context.off)


def _parse(
    fields: Fields, context: RequestContext, history: History, write: Write = _writer
) -> tuple[Sequence[GenerateRequest], ApiWriter]:
    request = _read(fields, history)
    chat = {**request.chat, "messages": request.messages(history)}
    try:
        parsed, _ = parse_chat(chat)
    except InvalidRequestError as error:
        error.param = error.param and request.own_name(error.param)
        raise
    return [parsed], write(request, context, history)


def _translate(
    fields: Fields, context: RequestContext, history: History, templated: bool, write: Write = _writer
) -> tuple[Fields, ApiWriter]:
    """The request as a chat. Only servers that apply a chat template take thoughts from before the tool loop."""
    request = _read(fields, history)
    _check_history(history, context.upstream)
    messages = request.messages(history) if templated else without_past_thoughts(request.messages(history))
    if len(messages) > MAX_MESSAGES:
        message = f"the conversation has more than {MAX_MESSAGES} messages"
        raise InvalidRequestError(message, param="input")
    return {**request.chat, "messages": messages}, write(request, context, history)


def _check_history(history: History, backend: OpenAIBackend) -> None:
    """Raise `InvalidRequestError` for what this upstream may not get, though the one before it may have got it."""
    try:
        UpstreamFields(backend.settings).check({"input": history}, RESPONSES)
    except InvalidRequestError as error:
        message = f"an earlier response: {error.message}"
        raise InvalidRequestError(message, param="previous_response_id") from None


_SUMMARIZE = (
    "Summarize this conversation for whoever goes on with it: what was asked, what was decided and done, names, paths"
    " and values that matter, and what is left to do. Answer with the summary alone."
)


class _CompactionWriter(ResponsesWriter):
    """Writes the answer to a request for a summary as a compacted conversation: what the user said, and the summary."""

    def __init__(self, request: ResponsesRequest, context: RequestContext, history: History) -> None:
        super().__init__(request, stored=False)
        self._users = [item for item in (*history, *request.items[:-1]) if item.get("role") == "user"]

    def body(self) -> dict[str, Any]:
        made = self._events.response
        parts = [part for item in made["output"] if item["type"] == "message" for part in item["content"]]
        output = [*self._users, compaction("".join(part.get("text", "") for part in parts))]
        return {
            **{name: made[name] for name in ("id", "created_at", "usage")},
            "object": "response.compaction",
            "output": output,
        }


def _asking_for_summary(fields: Fields) -> Fields:
    if fields.get("stream"):
        raise InvalidRequestError("stream must be false: a compacted conversation comes whole", param="stream")
    given = fields.get("input")
    if given is None and fields.get("previous_response_id") is not None:
        given = []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    asked = [*items, {"role": "user", "content": _SUMMARIZE}] if isinstance(items, list) else items
    return {**fields, "input": asked, "store": False}


COMPACTION = Api(
    RESPONSES,
    lambda fields, context, history: _parse(_asking_for_summary(fields), context, history, _CompactionWriter),
    lambda fields, context, history, templated: _translate(
        _asking_for_summary(fields), context, history, templated, _CompactionWriter
    ),
    keeps_answers=True,
)
OPENAI_RESPONSES = Api(RESPONSES, _parse, _translate, ResponsesInspector, keeps_answers=True)
