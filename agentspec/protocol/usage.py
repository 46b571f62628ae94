"""The counts in an answer: OpenAI's `usage` object, and the gateway's `speculation` object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, replace
from itertools import chain
from typing import Any

from agentspec.types import (
    KnnSpeculation,
    LossyAcceptanceSpeculation,
    RetrievalSpeculation,
    Speculation,
    StepSpeculation,
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
