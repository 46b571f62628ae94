"""The four APIs as a client sees them: a case's body, and its answer read by the SDKs' own types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.protocol.wire import SseDecoder
from tests.matrix.cases import Case

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
VALUE = {"colour": "red"}


@dataclass
class Answer:
    """What arrived, in one form for all APIs. `ended` is why the model stopped, None if it did not say."""

    status: int
    text: str = ""
    thoughts: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ended: str | None = None
    usage: tuple[int, int] | None = None
    error: str | None = None
    id: str = ""


def body_of(case: Case, model: str) -> dict[str, Any]:
    """The request of a case. What the scripted models shall do stands in its prompt."""
    length = most_tokens(case)
    text = f"[[{case.content} {case.ending}]] Which colour?"
    if case.api == "completions":
        usage = {"stream_options": {"include_usage": True}} if case.stream else {}
        return {"model": model, "prompt": text, "max_tokens": length, "temperature": 0, "stream": case.stream, **usage}
    made = {"chat": _chat, "responses": _responses, "messages": _messages}[case.api](case, text, length)
    return {"model": model, "temperature": 0, "stream": case.stream, **made}


def most_tokens(case: Case) -> int:
    """How long the answer may be: the engine's tokens are bytes, and it is left in the middle of a long answer."""
    if case.ending == "length":
        return 3
    return 1500 if case.ending == "disconnect" and case.backend == "engine" else 90


def _chat(case: Case, text: str, length: int) -> dict[str, Any]:
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    body: dict[str, Any] = {"messages": [_user(case, text, parts)], "max_tokens": length}
    if case.stream:
        body["stream_options"] = {"include_usage": True}
    if case.content == "tools":
        function = {"name": "pick", "parameters": SCHEMA}
        body |= {"tools": [{"type": "function", "function": function}]}
    if case.content == "structured":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA}}
    return body


def _responses(case: Case, text: str, length: int) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": IMAGE, "detail": "auto"}]
    body: dict[str, Any] = {"input": [_user(case, text, parts)], "max_output_tokens": length}
    if case.content == "tools":
        body |= {"tools": [{"type": "function", "name": "pick", "parameters": SCHEMA}]}
    if case.content == "structured":
        body["text"] = {"format": {"type": "json_schema", "name": "pick", "schema": SCHEMA}}
    return body


def _messages(case: Case, text: str, length: int) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
    parts = [{"type": "text", "text": text}, {"type": "image", "source": source}]
    body: dict[str, Any] = {"messages": [_user(case, text, parts)], "max_tokens": length}
    if case.content == "tools":
        body |= {"tools": [{"name": "pick", "input_schema": SCHEMA}]}
    if case.content == "structured":
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    return body


def _user(case: Case, text: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": parts if case.content == "image" else text}


def read(api: str, status: int, content: bytes, *, stream: bool) -> Answer:
    """The answer in `content`. Raises pydantic's `ValidationError` for what the API's own types do not take."""
    answer = Answer(status)
    if status >= 400 or not stream:
        value = json.loads(content)
        if status >= 400:
            answer.error = value["error"]["message"]
        else:
            WHOLE[api](answer, value)
        return answer
    for value in _events(content):
        if value.get("type") == "error" or (value.get("error") and "type" not in value):
            answer.error = value.get("message") or value["error"]["message"]
        elif value.get("type") != "ping":
            STREAMED[api](answer, value)
    return answer


def _events(content: bytes) -> Iterable[Any]:
    decoder = SseDecoder()
    assert content.endswith(b"\n\n")  # a stream ends with a whole event
    return [json.loads(data) for data in decoder.feed(content) if data != "[DONE]"]


def _chat_whole(answer: Answer, value: Any) -> None:
    chat = ChatCompletion.model_validate(value)
    [choice] = chat.choices
    answer.text, answer.ended = choice.message.content or "", choice.finish_reason
    answer.thoughts = getattr(choice.message, "reasoning_content", None) or ""
    answer.calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()]  # type: ignore[union-attr]
    if chat.usage:
        answer.usage = chat.usage.prompt_tokens, chat.usage.completion_tokens


def _chat_event(answer: Answer, value: Any) -> None:
    chunk = ChatCompletionChunk.model_validate(value)
    for choice in chunk.choices:
        answer.text += choice.delta.content or ""
        answer.thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        answer.ended = choice.finish_reason or answer.ended
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            _add_call(answer, call.index, call.function.name, call.function.arguments or "")
    if chunk.usage:
        answer.usage = chunk.usage.prompt_tokens, chunk.usage.completion_tokens


def _completion(answer: Answer, value: Any) -> None:
    """Whole answers and chunks have one form, whose type knows no choice that goes on."""
    answer.ended = next((one["finish_reason"] for one in value["choices"]), None) or answer.ended
    choices = [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in value["choices"]]
    completion = Completion.model_validate({**value, "choices": choices})
    answer.text += "".join(choice.text for choice in completion.choices)
    if completion.usage:
        answer.usage = completion.usage.prompt_tokens, completion.usage.completion_tokens


def _response_whole(answer: Answer, value: Any) -> None:
    response = Response.model_validate(value)
    answer.id, answer.text, answer.ended = response.id, response.output_text, response.status
    for item in response.output:
        if item.type == "function_call":
            answer.calls.append((item.name, item.arguments))
        if item.type == "reasoning":
            answer.thoughts += "".join(part.text for part in item.content or ())
    if response.usage:
        answer.usage = response.usage.input_tokens, response.usage.output_tokens
    if response.error:
        answer.error = response.error.message


RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def _response_event(answer: Answer, value: Any) -> None:
    event = RESPONSE_EVENT.validate_python(value)
    if event.type in ("response.completed", "response.incomplete", "response.failed"):
        streamed = answer.text
        _response_whole(answer, value["response"])
        assert event.type == "response.failed" or streamed == answer.text
    elif event.type == "response.output_text.delta":
        answer.text += event.delta


def _message_whole(answer: Answer, value: Any) -> None:
    message = Message.model_validate(value)
    for block in message.content:
        if block.type == "text":
            answer.text += block.text
        elif block.type == "thinking":
            answer.thoughts += block.thinking
        elif block.type == "tool_use":
            answer.calls.append((block.name, json.dumps(block.input)))
    answer.ended, answer.usage = message.stop_reason, (_prompt_tokens(message.usage), message.usage.output_tokens)


def _message_event(answer: Answer, value: Any) -> None:
    event = MESSAGE_EVENT.validate_python(value)
    if event.type == "content_block_start" and event.content_block.type == "tool_use":
        answer.calls.append((event.content_block.name, ""))
    elif event.type == "content_block_delta":
        delta = event.delta
        answer.text += getattr(delta, "text", "")
        answer.thoughts += getattr(delta, "thinking", "")
        if delta.type == "input_json_delta":
            _add_call(answer, len(answer.calls) - 1, None, delta.partial_json)
    elif event.type == "message_start":
        answer.usage = _prompt_tokens(event.message.usage), event.message.usage.output_tokens
    elif event.type == "message_delta":
        assert answer.usage is not None
        answer.ended = event.delta.stop_reason
        answer.usage = _prompt_tokens(event.usage) or answer.usage[0], event.usage.output_tokens


def _prompt_tokens(usage: Any) -> int:
    """All tokens of a prompt: `input_tokens` are those that no cache had."""
    return (usage.input_tokens or 0) + (usage.cache_read_input_tokens or 0)


def _add_call(answer: Answer, index: int, name: str | None, arguments: str) -> None:
    if index == len(answer.calls):
        answer.calls.append((name or "", ""))
    before, so_far = answer.calls[index]
    answer.calls[index] = before, so_far + arguments


Reader = Callable[[Answer, Any], None]
WHOLE: dict[str, Reader] = {
    "chat": _chat_whole,
    "completions": _completion,
    "responses": _response_whole,
    "messages": _message_whole,
}
STREAMED: dict[str, Reader] = {
    "chat": _chat_event,
    "completions": _completion,
    "responses": _response_event,
    "messages": _message_event,
}
