"""What a span says of a model call: OpenTelemetry's `gen_ai.*` attributes of its request, answer and messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentspec.errors import UpstreamError
from agentspec.protocol.wire import SseDecoder, object_in
from agentspec.telemetry.tracing import captures_content
from agentspec.types import Labels, Speculation, Usage

if TYPE_CHECKING:
    from agentspec.telemetry.otel import Span

OPERATIONS = {
    **dict.fromkeys(("/chat/completions", "/messages", "/responses"), "chat"),
    "/completions": "text_completion",
    "/embeddings": "embeddings",
}
"""The `gen_ai.operation.name` of each route, below /v1."""
CAPTURED_BYTES = 1 << 20  # of an answer, of which a span may hold the text

_NUMBERS = {  # by OpenAI's field
    "max_tokens": ("max_tokens", int),
    "max_completion_tokens": ("max_tokens", int),
    "max_output_tokens": ("max_tokens", int),
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "frequency_penalty": ("frequency_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "seed": ("seed", int),
    "n": ("choice.count", int),
}
_PROMPTS = ("messages", "input", "prompt")


def of_request(fields: Mapping[str, Any], labels: Labels, stream: bool | None = None) -> dict[str, Any]:
    """The attributes of a request with these fields of OpenAI's, whose values may be of any type."""
    found: dict[str, Any] = {
        "gen_ai.provider.name": "agentspec",
        "gen_ai.conversation.id": labels.session,
        "gen_ai.workflow.name": labels.workflow,
        "gen_ai.agent.name": labels.step,
        "gen_ai.request.stream": stream or None,
    }
    for field, (name, kind) in _NUMBERS.items():
        value: Any = fields.get(field)
        if type(value) in (int, kind) and abs(value) < 1 << 63:
            found[f"gen_ai.request.{name}"] = kind(value)
    if found.get("gen_ai.request.choice.count") == 1:
        del found["gen_ai.request.choice.count"]
    return found


def of_answer(
    usage: Usage | None, speculation: Speculation | None, first: float | None = None, reasons: Sequence[str] = ()
) -> dict[str, Any]:
    """The attributes of an answer; `first` are the seconds to the first piece of a stream."""
    found: dict[str, Any] = {"gen_ai.response.time_to_first_chunk": first}
    found["gen_ai.response.finish_reasons"] = list(reasons) or None
    if usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens or None,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        }
    if speculation is not None:
        found |= {
            "agentspec.draft.tokens": speculation.drafted,
            "agentspec.accepted.tokens": speculation.accepted,
            "agentspec.verify.steps": speculation.forwards,
            "agentspec.strategy": getattr(speculation, "strategy", None) or None,
            "agentspec.estimated_seconds_saved": speculation.estimated_seconds_saved,
        }
    return found


def describe(span: Span, fields: Mapping[str, Any], context: Any, model: str | None) -> bool:
    """Set what the span of a request at the gateway says of it; `context` is its `RequestContext`. Returns whether the
    span may hold texts: where the operator captures them, and the client lets them be stored.
    """
    route = context.route
    span.rename(f"{OPERATIONS[context.api]} {model}")
    span.set(of_request(fields, context.labels, context.stream))
    span.set({"gen_ai.request.model": model, "gen_ai.response.model": route.upstream_model})
    span.set({"agentspec.backend": route.backend_name, "agentspec.tenant": context.tenant})
    captured: bool = context.store and captures_content()
    span.set({"gen_ai.input.messages": input_messages(fields) if captured else None})
    return captured


def end_request(span: Span, answer: Any) -> None:
    """End the span of a request at the gateway with what its `RequestAnswer` says."""
    span.set(of_answer(answer.usage, answer.speculation, answer.first_token if answer.stream else None))
    span.set({"http.response.status_code": answer.status or None, "agentspec.queue.seconds": answer.queued})
    if answer.attempt is not None:
        span.set({"agentspec.backend": answer.attempt.group})
    if answer.sent:
        span.set({"gen_ai.output.messages": output_messages(choices_of(bytes(answer.sent)))})
    span.end(answer.error or ("cancelled" if answer.outcome == "cancelled" else None))


def input_messages(fields: Mapping[str, Any]) -> str | None:
    """`gen_ai.input.messages` of a request with these fields."""
    given = next((fields[name] for name in _PROMPTS if fields.get(name) is not None), None)
    items = given if isinstance(given, list | tuple) else [given]
    messages = [item if isinstance(item, Mapping) else {"role": "user", "content": item} for item in items]
    shown = [{"role": str(one.get("role", "user")), "parts": list(_parts(one))} for one in messages]
    return None if given is None else json.dumps(shown, ensure_ascii=False)


def output_messages(choices: Iterable[tuple[str, str]]) -> str:
    """`gen_ai.output.messages` of an answer; each choice is its text and why it ended."""
    shown = [
        {"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": reason}
        for text, reason in choices
    ]
    return json.dumps(shown, ensure_ascii=False)


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content", message.get("output"))
    if message.get("role") == "tool":
        yield {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return
    for part in content if isinstance(content, list) else [{"text": content}]:
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            yield {"type": "text", "content": text}
        elif isinstance(part, Mapping) and part.get("type"):
            yield {"type": str(part["type"])}
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            asked = {"name": str(function.get("name")), "arguments": function.get("arguments")}
            yield {"type": "tool_call", "id": call.get("id"), **asked}


def choices_of(body: bytes) -> list[tuple[str, str]]:
    """The text of each choice in an answer of any API as it was sent, whole or as events, and why it ended."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events_of(body):
        for index, text, reason in pieces_of(event):
            texts[index] = texts.get(index, "") + (text if isinstance(text, str) else "")
            if isinstance(reason, str):
                reasons[index] = reason
    return [(text, reasons.get(index, "unknown")) for index, text in sorted(texts.items())]


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON objects in an answer as it was sent: the answer itself, or the events of a stream."""
    if body.lstrip().startswith(b"{"):
        return [object_in(body)]
    with suppress(UpstreamError):
        return [object_in(data) for data in SseDecoder(max_event_bytes=len(body) + 1).feed(body)]
    return []


def pieces_of(event: Mapping[str, Any]) -> Iterator[tuple[int, Any, Any]]:
    """Of an event or a whole answer of any API: the number of a choice, a piece of its text, and why it ended."""
    for choice in _objects(event.get("choices")):
        message = choice.get("delta") or choice.get("message")
        text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
        index = choice.get("index")
        yield index if isinstance(index, int) else 0, text, choice.get("finish_reason")
    delta, kind = event.get("delta"), event.get("type")
    if kind in ("content_block_delta", "message_delta"):
        yield 0, _member(delta, "text"), _member(delta, "stop_reason")
    elif kind in ("response.output_text.delta", "response.completed"):
        yield 0, delta, _member(event.get("response"), "status")
    items = [*_objects(event.get("output")), event]
    for block in (one for item in items for one in _objects(item.get("content"))):
        yield 0, block.get("text"), event.get("stop_reason") or event.get("status")


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
