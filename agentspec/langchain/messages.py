"""Converts LangChain's messages and tools to OpenAI's form, and deltas to LangChain's message chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    convert_to_openai_messages,
    message_chunk_to_message,
)
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk

from agentspec.errors import InvalidRequestError
from agentspec.protocol.deltas import UNKNOWN_TOKEN
from agentspec.protocol.messages import THOUGHTS, without_past_thoughts
from agentspec.protocol.tools import ToolCalls, whole_arguments
from agentspec.types import Delta, TokenLogprob, Usage

PROVIDER = "agentspec"
BROKEN = '"{]"{] (not a whole call)'  # text that ends so is no JSON, also for a parser that closes open brackets
_WHY = {
    "length": "the answer was cut off at max_tokens",
    "content_filter": "a content filter refused the answer",
    "cancelled": "the answer was broken off",
}
_SENT_BACK = ("text", "image_url", "image", "file", "input_audio", "audio")


def to_openai(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert messages to the form of the OpenAI API. The model's thoughts go along within a tool loop only."""
    return without_past_thoughts(one for message in messages for one in _converted(message))


@dataclass(slots=True)
class AnswerChunks:
    """Converts the deltas of one answer of `model_name` to message chunks.

    LangChain completes the JSON of tool calls when it adds chunks up, so that a call whose arguments were cut off would
    run with some of them. The last chunk adds `BROKEN` to such calls, by which each sum of the chunks has them among
    its `invalid_tool_calls`.
    """

    model_name: str
    _calls: dict[int, ToolCalls] = field(default_factory=dict)  # by choice
    _thoughts: str | None = None  # the name that the endpoint gives to thoughts

    def chunk(self, delta: Delta) -> AIMessageChunk:
        """The chunk of one delta; the last one completes the message with usage and metadata."""
        extra = dict(delta.extra)
        pieces = extra.pop("tool_calls", None) or []
        calls = self._calls.setdefault(delta.index, ToolCalls())
        calls.add(pieces)
        self._thoughts = self._thoughts or next((name for name in THOUGHTS if extra.get(name)), None)
        reasoning = _reasoning(extra)
        chunk = AIMessageChunk(
            content=delta.text,
            additional_kwargs=extra | ({"reasoning_content": reasoning} if reasoning else {}),
            tool_call_chunks=_tool_calls(pieces, _broken(calls, delta.finish_reason)),
            response_metadata=_metadata(delta, self.model_name, self._thoughts),
        )
        if delta.usage is not None:
            chunk.usage_metadata = to_usage_metadata(delta.usage)
        if delta.finish_reason is not None:
            chunk.chunk_position = "last"
        return chunk


def to_message(chunks: Sequence[AIMessageChunk]) -> AIMessage:
    """The message of all chunks of an answer. Its invalid calls have their arguments as they came, and say why."""
    message = cast(AIMessage, message_chunk_to_message(chunks[0] + chunks[1:]))
    error = why_invalid(message.response_metadata.get("finish_reason"))
    message.invalid_tool_calls = [
        {**call, "args": _as_sent(call), "error": error} for call in message.invalid_tool_calls
    ]
    return message


def why_invalid(finish_reason: str | None) -> str:
    """Why an answer that ended so has invalid calls."""
    return _WHY.get(finish_reason or "", "the arguments of its tool call are no JSON object")


def to_usage_metadata(usage: Usage) -> UsageMetadata:
    """Convert token counts to LangChain's form; those of predictions and of thoughts become separate output details."""
    output: dict[str, int] = {} if usage.reasoning_tokens is None else {"reasoning": usage.reasoning_tokens}
    if usage.accepted_prediction_tokens is not None:
        output["accepted_prediction"] = usage.accepted_prediction_tokens
    if usage.rejected_prediction_tokens is not None:
        output["rejected_prediction"] = usage.rejected_prediction_tokens
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
        output_token_details=OutputTokenDetails(**output),  # type: ignore[typeddict-item]
    )


def usage_of(answer: AIMessage) -> Usage | None:
    """The token counts that any chat model's answer states; None if it states none."""
    if (stated := answer.usage_metadata) is None:
        return None
    inputs, outputs = stated.get("input_token_details", {}), stated.get("output_token_details", {})
    return Usage(
        prompt_tokens=stated["input_tokens"],
        completion_tokens=stated["output_tokens"],
        cached_tokens=inputs.get("cache_read") or 0,
        reasoning_tokens=outputs.get("reasoning"),
    )


def to_tool_choice(choice: dict[str, Any] | str | bool, names: Sequence[str]) -> dict[str, Any] | str:
    """A tool choice in OpenAI's form. Raises `InvalidRequestError` for a tool that is not in `names`."""
    if choice is True or choice == "any":
        return "required"
    if isinstance(choice, dict):
        wanted = choice.get("function", {}).get("name", choice.get("name"))
    elif choice in ("auto", "none", "required"):
        return str(choice)
    else:
        wanted = choice
    if wanted not in names:
        raise InvalidRequestError(f"tool_choice {wanted!r} is none of the tools {list(names)!r}", param="tool_choice")
    return {"type": "function", "function": {"name": wanted}}


def _converted(message: BaseMessage) -> list[dict[str, Any]]:
    """A message as one, or as several if it holds results of tools. Calls whose arguments are no JSON go as they came,
    after the others, as ChatOpenAI sends them: a result may answer them.
    """
    converted = convert_to_openai_messages([_without_thoughts(message)])
    if isinstance(message, AIMessage) and (thoughts := _thoughts_in(message)):
        named = message.response_metadata.get("reasoning_field")
        converted[0] = {**converted[0], named if named in THOUGHTS else THOUGHTS[0]: thoughts}
    if isinstance(message, AIMessage) and message.invalid_tool_calls:
        calls = converted[0].get("tool_calls", [])
        for call in message.invalid_tool_calls:
            function = {"name": call["name"] or "", "arguments": _as_sent(call)}
            calls = [*calls, {"type": "function", "id": call["id"], "function": function}]
        converted[0] = {**converted[0], "tool_calls": calls}
    return converted


def _as_sent(call: InvalidToolCall) -> str:
    """The arguments of an invalid call as the model wrote them."""
    return (call["args"] or "").removesuffix(BROKEN)


def _broken(calls: ToolCalls, finish_reason: str | None) -> Iterator[int]:
    """Which calls of an answer must not run, once it has ended."""
    for index, call in enumerate(calls.whole() if finish_reason else ()):
        if whole_arguments(call["function"].get("arguments"), finish_reason) is None:
            yield index


def _without_thoughts(message: BaseMessage) -> BaseMessage:
    """An earlier answer without the content blocks that are not sent back, such as reasoning."""
    if not isinstance(message, AIMessage) or isinstance(message.content, str):
        return message
    sent = [part for part in message.content if isinstance(part, str) or part.get("type") in _SENT_BACK]
    return message.model_copy(update={"content": sent or ""})


def _thoughts_in(message: AIMessage) -> str:
    """The thoughts of an earlier answer, also of another chat model."""
    if isinstance(thoughts := message.additional_kwargs.get(THOUGHTS[0]), str):
        return thoughts
    return "".join(block.get("reasoning", "") for block in message.content_blocks if block["type"] == "reasoning")


def _reasoning(extra: dict[str, Any]) -> str:
    """Remove the upstream's reasoning from `extra`, under either of its two names, and return it."""
    found = [extra.pop(name) for name in THOUGHTS if isinstance(extra.get(name), str)]
    return next((text for text in found if text), "")


def _tool_calls(pieces: Sequence[Mapping[str, Any]], broken: Iterable[int]) -> list[ToolCallChunk]:
    """One chunk for each call that the pieces belong to, and for each that is `broken`."""
    calls: dict[int, ToolCallChunk] = {}
    for position, piece in enumerate(pieces):
        index, function = piece.get("index", position), piece.get("function") or {}
        empty = tool_call_chunk(name=function.get("name"), args="", id=piece.get("id"), index=index)
        call = calls.setdefault(index, empty)
        call["args"] = (call["args"] or "") + (function.get("arguments") or "")
    for index in broken:
        call = calls.setdefault(index, tool_call_chunk(args="", index=index))
        call["args"] = (call["args"] or "") + BROKEN
    return [*calls.values()]


def _metadata(delta: Delta, model_name: str, thoughts: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if delta.logprobs:
        found["logprobs"] = {"content": [_logprob(item) for item in delta.logprobs]}
    if delta.finish_reason is None:
        return found
    found |= {"finish_reason": delta.finish_reason, "model_name": model_name, "model_provider": PROVIDER}
    found |= {} if thoughts is None else {"reasoning_field": thoughts}
    if delta.speculation is not None:
        found["speculation"] = asdict(delta.speculation)
    return found


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "surrogatepass"))  # a token may be a lone surrogate


def _logprob(item: TokenLogprob) -> dict[str, Any]:
    """One token as OpenAI describes it, with its `token_id` unless the endpoint names tokens by their text alone."""
    known = {} if item.token_id == UNKNOWN_TOKEN else {"token_id": item.token_id}
    one = {"token": item.text, **known, "logprob": item.logprob, "bytes": _bytes(item.text)}
    return one | {"top_logprobs": [{"token": top.text, "logprob": top.logprob} for top in item.top]}
