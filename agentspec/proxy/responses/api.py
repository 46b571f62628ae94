"""The row of the Responses API; see `protocol/openai_responses/` for how requests and answers correspond to chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.backends.base import RESPONSES
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.errors import InvalidRequestError
from agentspec.protocol.messages import without_past_thoughts
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.items import Item, compaction
from agentspec.protocol.openai_responses.request import ResponsesRequest, parse_responses
from agentspec.protocol.requests import MAX_MESSAGES, parse_chat
from agentspec.protocol.responses import ApiWriter
from agentspec.proxy.api import Api, Fields, History
from agentspec.proxy.body.upstream_fields import UpstreamFields
from agentspec.proxy.request_context import RequestContext
from agentspec.proxy.responses.stored import ResponsesInspector
from agentspec.types import GenerateRequest

Write = Callable[[ResponsesRequest, RequestContext, History], EventWriter]


def _writer(request: ResponsesRequest, context: RequestContext, history: History) -> EventWriter:
    writer = EventWriter(request)
    writer.stored = request.store and "store" not in context.off
    return writer


def _parse(
    fields: Fields, context: RequestContext, history: History, write: Write = _writer
) -> tuple[Sequence[GenerateRequest], ApiWriter]:
    request = parse_responses(fields, history)
    try:
        parsed, _ = parse_chat({**request.chat, "messages": request.messages(history)})
    except InvalidRequestError as error:
        error.param = error.param and request.own_name(error.param)
        raise
    return [parsed], write(request, context, history)


def _translate(
    fields: Fields, context: RequestContext, history: History, templated: bool, write: Write = _writer
) -> tuple[Fields, ApiWriter]:
    """The request as a chat. Only servers that apply a chat template take thoughts from before the tool loop."""
    request = parse_responses(fields, history)
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


@dataclass(slots=True)
class _CompactionWriter(EventWriter):
    """Writes the answer to a request for a summary as a compacted conversation: what the user said, and the summary."""

    users: Sequence[Item] = ()

    def body(self) -> dict[str, Any]:
        made = EventWriter.body(self)
        parts = [part for item in made["output"] if item["type"] == "message" for part in item["content"]]
        output = [*self.users, compaction("".join(part.get("text", "") for part in parts))]
        named = {name: made[name] for name in ("id", "created_at", "usage")}
        return {**named, "object": "response.compaction", "output": output}


def _compaction_writer(request: ResponsesRequest, context: RequestContext, history: History) -> EventWriter:
    users = [item for item in (*history, *request.items[:-1]) if item.get("role") == "user"]
    return _CompactionWriter(request, users=users)


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
    lambda fields, context, history: _parse(_asking_for_summary(fields), context, history, _compaction_writer),
    lambda fields, context, history, templated: _translate(
        _asking_for_summary(fields), context, history, templated, _compaction_writer
    ),
    keeps_answers=True,
)
OPENAI_RESPONSES = Api(RESPONSES, _parse, _translate, ResponsesInspector, keeps_answers=True)
