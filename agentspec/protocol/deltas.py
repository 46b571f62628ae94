"""Reads what OpenAI-compatible servers send as deltas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentspec.errors import UpstreamError
from agentspec.protocol.responses import clamped
from agentspec.protocol.speculation import count_of, reported_speculation
from agentspec.protocol.wire import reported
from agentspec.types import Delta, FinishReason, TokenLogprob, Usage


def read_usage(value: Mapping[str, Any]) -> Usage:
    """Read a `usage` object of the Chat Completions, the Responses or the Messages API.

    Raises `AttributeError`, `TypeError`, `ValueError` or `OverflowError` for an object of the wrong shape.
    """
    prompt = value.get("prompt_tokens_details") or value.get("input_tokens_details") or {}
    completion = value.get("completion_tokens_details") or value.get("output_tokens_details") or {}
    reasoning = completion.get("reasoning_tokens", value.get("reasoning_tokens"))
    read, written = count_of(value.get("cache_read_input_tokens")), count_of(value.get("cache_creation_input_tokens"))
    whole = value.get("prompt_tokens")  # of all tokens, also where LiteLLM adds Anthropic's counts of its cache
    summed = count_of(value.get("input_tokens")) + read + written  # the Messages API counts those of its cache apart
    return Usage(
        prompt_tokens=summed if whole is None else count_of(whole),
        completion_tokens=count_of(value.get("completion_tokens", value.get("output_tokens"))),
        cached_tokens=count_of(prompt.get("cached_tokens")) or read,
        accepted_prediction_tokens=_optional_count(completion.get("accepted_prediction_tokens")),
        rejected_prediction_tokens=_optional_count(completion.get("rejected_prediction_tokens")),
        reasoning_tokens=_optional_count(reasoning),
    )


def _optional_count(value: Any) -> int | None:
    """A count that an answer may leave out."""
    return None if value is None else count_of(value)


UNKNOWN_TOKEN = -1  # token id of a logprob from an upstream that names tokens only by their text
# Why answers end, in OpenAI's words and those of others behind its protocol: vLLM, SGLang, DeepSeek, Gemini, Mistral,
# Z.ai, and translations of Anthropic's. A plain end has many names: a word that is not here is one.
_REASONS: dict[FinishReason, str] = {
    "length": "length max_tokens max_output_tokens model_length model_context_window_exceeded",
    "tool_calls": "tool_calls function_call tool_use",
    "content_filter": "content_filter safety sensitive recitation refusal blocklist prohibited_content spii",
    "cancelled": "cancelled abort aborted error network_error insufficient_system_resource malformed_function_call",
}
_FINISH: dict[str, FinishReason] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_MESSAGE_FIELDS = ("role", "content")


def to_delta(chunk: Any) -> Delta:
    """Read one chunk of a stream, or a whole answer, as a delta. Ignores all choices but the first.

    Raises `UpstreamError` for a chunk of the wrong shape and for a chunk that reports an error.
    """
    try:
        if error := reported(chunk):
            message = error.get("message") if isinstance(error, Mapping) else error
            raise UpstreamError(f"the upstream broke off with an error: {str(message)[:2000]}")
        choices = chunk.get("choices") or ()
        choice: Mapping[str, Any] = next((one for one in choices if one.get("index") in (0, None)), {})
        message = choice.get("delta") or choice.get("message") or {}
        usage = read_usage(counts) if (counts := chunk.get("usage")) else None
        return Delta(
            text=_string(message.get("content")) + _string(choice.get("text")),
            token_ids=tuple(int(token) for token in choice.get("token_ids") or ()),
            logprobs=_logprobs(choice.get("logprobs")),
            finish_reason=_finish_reason(choice.get("finish_reason")),
            stop_reason=_stop_reason(choice),
            usage=usage,
            speculation=reported_speculation(chunk, usage),
            extra=_extra(message),
        )
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        raise UpstreamError("the upstream sent a chunk of the wrong shape") from None


def merged(last: Delta, late: Delta) -> Delta:
    """`last` with what came after the finish reason: usage, speculation, further pieces of text, thoughts and calls."""
    grown = {
        name: last.extra[name] + piece
        for name, piece in late.extra.items()
        if isinstance(piece, str | list) and type(last.extra.get(name)) is type(piece)
    }
    return replace(
        last,
        text=last.text + late.text,
        token_ids=last.token_ids + late.token_ids,
        logprobs=last.logprobs + late.logprobs,
        usage=late.usage or last.usage,
        speculation=late.speculation or last.speculation,
        extra={**last.extra, **late.extra, **grown},
    )


def _extra(message: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields of a message, without nulls. Raises `ValueError` for what JSON cannot write again, as NaN."""
    extra = {key: value for key, value in message.items() if key not in _MESSAGE_FIELDS and value is not None}
    if extra:
        json.dumps(extra, allow_nan=False)
    if "tool_calls" in extra:
        extra["tool_calls"] = [_call_piece(call) for call in extra["tool_calls"]]
    return extra


def _call_piece(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call, or a piece of one, without nulls: SGLang sends whole calls with one for an index.

    Raises `TypeError` or `AttributeError` for one that cannot be put together with others.
    """
    given = {key: value for key, value in call.items() if value is not None}
    index, function = given.get("index", 0), given.get("function", {})
    texts = (function.get("name"), function.get("arguments"))
    if type(index) is not int or index < 0 or not all(isinstance(text, str | None) for text in texts):
        raise TypeError(call)
    return given


def _string(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise TypeError(value)


def _finish_reason(value: object) -> FinishReason | None:
    if value is None or value == "":
        return None
    return _FINISH.get(str(value).lower(), "stop")


def _stop_reason(choice: Mapping[str, Any]) -> str | None:
    """The stop string that ended a choice, as vLLM and SGLang report it; a token that ended it has an id there."""
    found = (choice.get("stop_reason"), choice.get("matched_stop"))
    return next((text for text in found if isinstance(text, str)), None)


def _logprobs(value: Mapping[str, Any] | None) -> tuple[TokenLogprob, ...]:
    if not value:
        return ()
    if "tokens" in value:
        tops = value.get("top_logprobs") or [None] * len(value["tokens"])
        return tuple(
            _token(token, logprob, tuple(_token(*item) for item in (top or {}).items()))
            for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
        )
    return tuple(
        _token(
            item["token"],
            item["logprob"],
            tuple(_token(top["token"], top["logprob"]) for top in item.get("top_logprobs") or ()),
        )
        for item in value.get("content") or ()
    )


def _token(text: str, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(UNKNOWN_TOKEN, _string(text), 0.0 if logprob is None else clamped(float(logprob)), top)
