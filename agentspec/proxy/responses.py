"""What both routes' answers share: usage, speculation, bytes."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from agentspec.types import Delta, Prompt, Speculation, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # how OpenAI writes a probability of zero; JSON knows no infinity


@dataclass(slots=True)
class Said:
    """Everything one choice has said so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason
        for name, value in delta.extra.items():
            before = self.extra.get(name)
            if name == "tool_calls":
                self.extra[name] = _with_calls(before or [], value)
            else:
                self.extra[name] = before + value if isinstance(before, str) and isinstance(value, str) else value


@dataclass(slots=True)
class Gathered:
    """An answer as far as it has come: its choices, and what they share."""

    choices: dict[int, Said] = field(default_factory=dict)
    prompt: Prompt | None = None
    usage: Usage = field(default_factory=Usage)
    speculation: Speculation | None = None

    def add(self, delta: Delta) -> None:
        self.choices.setdefault(delta.index, Said()).add(delta)
        self.prompt = delta.prompt or self.prompt
        self.usage = delta.usage or self.usage
        self.speculation = delta.speculation or self.speculation

    def all(self) -> list[tuple[int, Said]]:
        """The choices in order; an answer without any delta has one that says nothing."""
        return sorted(self.choices.items()) or [(0, Said())]


def _with_calls(calls: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole tool calls with what the next pieces add to them: a head with a new id, or more of the arguments."""
    calls = [{**call, "function": dict(call["function"])} for call in calls]
    for position, piece in enumerate(pieces):
        index = piece.get("index", position)
        if index >= len(calls):
            head = {name: value for name, value in piece.items() if name != "index"}
            calls.append({**head, "function": dict(piece.get("function") or {})})
        else:
            function = calls[index]["function"]
            added = (piece.get("function") or {}).get("arguments") or ""
            function["arguments"] = (function.get("arguments") or "") + added
    return calls


class Writer(Protocol):
    """Says one answer in the words of its route."""

    def body(self, answer: Gathered) -> dict[str, Any]:
        """The whole answer."""
        ...

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The chunks that one delta becomes: none if it says nothing, two if it is the last and usage is wanted."""
        ...


@dataclass(slots=True)
class Envelope:
    """What every chunk of an answer repeats, and the switches for what its end carries."""

    kind: str
    model: str
    prefix: str
    include_usage: bool = False
    include_speculation: bool = True
    choices: int = 1
    _ended: int = field(default=0, init=False)
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def wrap(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}

    def chunk(self, choice: dict[str, Any], delta: Delta, **more: Any) -> Iterator[dict[str, Any]]:
        """The chunk of `choice`; after the last end of all the usage on a chunk of its own, if it was asked for."""
        self._ended += delta.finish_reason is not None
        ends = delta.finish_reason is not None and self._ended == self.choices
        null_usage = {"usage": None} if self.include_usage else {}
        at_end = self._speculation(delta.speculation)
        yield self.wrap([choice], **more, **null_usage, **(at_end if ends and not self.include_usage else {}))
        if ends and self.include_usage:
            yield self.wrap([], usage=usage_object(delta.usage or Usage()), **at_end)

    def whole(self, choices: list[dict[str, Any]], answer: Gathered) -> dict[str, Any]:
        return self.wrap(choices, usage=usage_object(answer.usage), **self._speculation(answer.speculation))

    def _speculation(self, speculation: Speculation | None) -> dict[str, Any]:
        if speculation is None or not self.include_speculation:
            return {}
        rounded = round(speculation.estimated_seconds_saved, 6)
        return {"speculation": asdict(speculation) | {"estimated_seconds_saved": rounded}}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`. The prediction counts are there only if the request carried a prediction."""
    accepted, rejected = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
    counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    details = {} if accepted is None else {"completion_tokens_details": counts}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **details,
    }


def prompt_logprobs(prompt: Prompt) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: for each token itself and the best ones by id; nothing for the first."""
    if prompt.logprobs is None:
        return None
    return [None, *({str(one.token_id): _ranked(one) for one in (*token.top, token)} for token in prompt.logprobs)]


def _ranked(token: TokenLogprob) -> dict[str, Any]:
    return {"logprob": clamped(token.logprob), "rank": token.rank, "decoded_token": token.text}


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8; what cannot be text (half a surrogate pair) becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def clamped(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
