"""Reads what OpenAI-compatible servers send as deltas, and the counts of answers: `usage` and `speculation`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, replace
from itertools import chain
from typing import Any

from agentspec.errors import UpstreamError
from agentspec.protocol.wire import reported
from agentspec.types import (
    Delta,
    FinishReason,
    KnnSpeculation,
    LossyAcceptanceSpeculation,
    Prompt,
    RetrievalSpeculation,
    Speculation,
    StepSpeculation,
    TokenLogprob,
    Usage,
)

_MOST = 2**53  # every JSON parser keeps integers exact up to here
_JSON_TYPES: dict[str, Any] = {"bool": bool, "str": str, "tuple": list, "Mapping": Mapping}  # all others are numbers
_KINDS = (StepSpeculation, RetrievalSpeculation, KnnSpeculation, LossyAcceptanceSpeculation)


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object. It has prediction counts only if the request carried a prediction, and those of thoughts
    only if somebody counted them.
    """
    accepted, rejected = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
    thoughts = usage.reasoning_tokens
    counts: dict[str, int | None] = {} if thoughts is None else {"reasoning_tokens": thoughts}
    if accepted is not None:
        counts |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    details = {"completion_tokens_details": counts} if counts else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **details,
    }


def read_usage(value: Mapping[str, Any]) -> Usage:
    """Read a `usage` object of the Chat Completions, the Responses or the Messages API.

    Raises `AttributeError`, `TypeError`, `ValueError` or `OverflowError` for an object of the wrong shape.
    """
    prompt = value.get("prompt_tokens_details") or value.get("input_tokens_details") or {}
    completion = value.get("completion_tokens_details") or value.get("output_tokens_details") or {}
    reasoning = completion.get("reasoning_tokens", value.get("reasoning_tokens"))
    read, written = _count(value.get("cache_read_input_tokens")), _count(value.get("cache_creation_input_tokens"))
    told = value.get("prompt_tokens")  # of all tokens, also where LiteLLM tells those of Anthropic's cache beside it
    apart = _count(value.get("input_tokens")) + read + written  # the Messages API counts those of its cache apart
    return Usage(
        prompt_tokens=apart if told is None else _count(told),
        completion_tokens=_count(value.get("completion_tokens", value.get("output_tokens"))),
        cached_tokens=_count(prompt.get("cached_tokens")) or read,
        accepted_prediction_tokens=_told(completion.get("accepted_prediction_tokens")),
        rejected_prediction_tokens=_told(completion.get("rejected_prediction_tokens")),
        reasoning_tokens=_told(reasoning),
    )


def speculation_object(speculation: Speculation) -> dict[str, Any]:
    """A gateway's `speculation` object: the fields of the class that the strategy reports."""
    return asdict(speculation) | {"estimated_seconds_saved": round(speculation.estimated_seconds_saved, 6)}


def read_speculation(value: Mapping[str, Any]) -> Speculation | None:
    """Read a gateway's `speculation` object as the class it came from; None for another product's object.

    Raises as `read_usage` does, also for what JSON cannot write again: Python reads NaN, and numbers beyond a double's
    range as infinity.
    """
    if not all(field.name in value for field in fields(Speculation)):
        return None
    json.dumps(value, allow_nan=False)
    counts: dict[str, Any] = {name: _count(value[name]) for name in ("drafted", "accepted", "steps")}
    counts["estimated_seconds_saved"] = float(value["estimated_seconds_saved"])
    if "strategy" not in value:
        return Speculation(**counts)
    kind: type[Speculation] = max(_KINDS, key=lambda kind: sum(field.name in value for field in fields(kind)))
    own: dict[str, Any] = {}
    for field in fields(kind):  # a value of another type is left out
        kept = _JSON_TYPES.get(re.split(r"\W", str(field.type))[0], (int, float))
        if isinstance(one := value.get(field.name), kept):
            own[field.name] = tuple(one) if isinstance(one, list) else one
    return kind(**own | counts)


def summed(parts: Sequence[Speculation]) -> Speculation | None:
    """What speculation did for all answers to one request, in the class that says most; None without any.

    Counts and times add up. Of the other fields a value on which all agree stays, such as the strategy and its knobs;
    else the default, as of a share of right guesses.
    """
    if not parts:
        return None
    widest = max(parts, key=lambda part: len(fields(part)))
    return replace(widest, **{field.name: _summed(field, parts) for field in fields(widest)})


def _summed(field: Field[Any], parts: Sequence[Speculation]) -> Any:
    values = [getattr(part, field.name) for part in parts if hasattr(part, field.name)]
    if field.type in ("int", "float"):
        return sum(values)
    if field.type == "tuple[int, ...]":
        return tuple(chain.from_iterable(values))
    if field.type in ("Mapping[str, int]", "Mapping[str, float]"):
        return {key: sum(value.get(key, 0) for value in values) for key in dict.fromkeys(chain(*values))}
    if all(value == values[0] for value in values):
        return values[0]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _count(value: Any) -> int:
    return min(max(0, int(value or 0)), _MOST)


def _told(value: Any) -> int | None:
    """A count that an answer may leave out."""
    return None if value is None else _count(value)


LOWEST_LOGPROB = -9999.0  # how OpenAI writes a probability of zero; JSON has no infinity
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
_TOKEN_BYTES = 16  # of a token besides its text, at least
_MESSAGE_FIELDS = ("role", "content")
_THOUGHTS = ("reasoning", "reasoning_content")


def to_delta(chunk: Any) -> Delta:
    """Read one chunk of a stream, or a whole answer, as a delta. Ignores all choices but the first.

    Raises `UpstreamError` for a chunk of the wrong shape and for a chunk that reports an error.
    """
    try:
        if error := reported(chunk):
            raise _broken_off(error)
        choice = _first_choice(chunk.get("choices") or ())
        message = choice.get("delta") or choice.get("message") or {}
        return Delta(
            text=_text(message.get("content")) + _text(choice.get("text")),
            token_ids=tuple(int(token) for token in choice.get("token_ids") or ()),
            logprobs=_logprobs(choice.get("logprobs")),
            finish_reason=_finish_reason(choice.get("finish_reason")),
            stop_reason=_stop_reason(choice),
            usage=read_usage(usage) if (usage := chunk.get("usage")) else None,
            speculation=read_speculation(counts) if (counts := chunk.get("speculation")) else None,
            extra=_extra(message),
        )
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        raise UpstreamError("the upstream sent a chunk of the wrong shape") from None


def merged(last: Delta, late: Delta) -> Delta:
    """`last` with the fields of a delta that came after the finish reason: usage, speculation, extra fields."""
    calls = [*last.extra.get("tool_calls", ()), *late.extra.get("tool_calls", ())]
    return replace(
        last,
        text=last.text + late.text,
        token_ids=last.token_ids + late.token_ids,
        logprobs=last.logprobs + late.logprobs,
        usage=late.usage or last.usage,
        speculation=late.speculation or last.speculation,
        extra={**last.extra, **late.extra, **({"tool_calls": calls} if calls else {})},
    )


def without_reasoning(delta: Delta) -> Delta:
    """`delta` without its thoughts, and without log-probabilities and token ids, which would tell them."""
    extra = {name: value for name, value in delta.extra.items() if name not in _THOUGHTS}
    return replace(delta, token_ids=(), logprobs=(), extra=extra)


def size_of(delta: Delta) -> int:
    """About how many bytes `delta` adds to an answer that is kept."""
    prompt = delta.prompt or Prompt()
    logprobs = (*delta.logprobs, *(prompt.logprobs or ()))
    tokens = sum(_TOKEN_BYTES + len(one.text) for token in logprobs for one in (token, *token.top))
    extra = len(str(delta.extra)) if delta.extra else 0
    texts, ids = len(prompt.text) + len(delta.text), len(prompt.token_ids) + len(delta.token_ids)
    return _TOKEN_BYTES + texts + extra + 8 * ids + tokens


class CallNumbers:
    """Numbers the tool calls of one answer from 0, as they begin.

    Servers count them in other ways, too: from 1, or each as 0, which only its own id and name tell from the last.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._numbers: dict[int, int] = {}  # by the server's own

    def numbered(self, delta: Delta) -> Delta:
        calls = delta.extra.get("tool_calls")
        if not calls:
            return delta
        told = [{**call, "index": self._number(call, at)} for at, call in enumerate(calls)]
        return replace(delta, extra={**delta.extra, "tool_calls": told})

    def _number(self, call: Mapping[str, Any], position: int) -> int:
        place, id = call.get("index", position), str(call.get("id") or "")
        number = self._numbers.get(place)
        named = id and call.get("function", {}).get("name")  # vLLM gave each piece an id of its own, but no name
        if number is None or (named and self._ids[number] not in ("", id)):
            number = self._numbers[place] = len(self._ids)
            self._ids.append(id)
        return number


def _extra(message: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields of a message, without nulls. Raises `ValueError` for what JSON cannot write again, as NaN."""
    extra = {key: value for key, value in message.items() if key not in _MESSAGE_FIELDS and value is not None}
    if extra:
        json.dumps(extra, allow_nan=False)
    if "tool_calls" in extra:
        extra["tool_calls"] = [_call(call) for call in extra["tool_calls"]]
    return extra


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call, or a piece of one, without nulls: SGLang sends whole calls with one for an index.

    Raises `TypeError` or `AttributeError` for one that nobody could put together with others.
    """
    kept = {key: value for key, value in call.items() if value is not None}
    index, function = kept.get("index", 0), kept.get("function", {})
    texts = (function.get("name"), function.get("arguments"))
    if type(index) is not int or index < 0 or not all(isinstance(text, str | None) for text in texts):
        raise TypeError(call)
    return kept


def _first_choice(choices: Iterable[Any]) -> Mapping[str, Any]:
    return next((choice for choice in choices if choice.get("index") in (0, None)), {})


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise TypeError(value)


def _finish_reason(value: object) -> FinishReason | None:
    if value is None or value == "":
        return None
    return _FINISH.get(str(value).lower(), "stop")


def _stop_reason(choice: Mapping[str, Any]) -> str | None:
    """The stop string that ended a choice, as vLLM and SGLang tell it; both name a token that did by its id."""
    told = (choice.get("stop_reason"), choice.get("matched_stop"))
    return next((text for text in told if isinstance(text, str)), None)


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
    return TokenLogprob(UNKNOWN_TOKEN, _text(text), 0.0 if logprob is None else clamped(float(logprob)), top)


def _broken_off(error: Any) -> UpstreamError:
    message = error.get("message") if isinstance(error, Mapping) else error
    return UpstreamError(f"the upstream broke off with an error: {str(message)[:2000]}")


def clamped(logprob: float) -> float:
    return max(LOWEST_LOGPROB, min(logprob, 0.0))  # in this order NaN is the lowest, too
