"""Writes the answers of `/v1/chat/completions` and `/v1/completions`: whole ones, and the chunks of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from agentspec.protocol.messages import THOUGHTS
from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.speculation import MeasuredSpeculation
from agentspec.protocol.tools import ToolCalls
from agentspec.protocol.wire import DONE
from agentspec.types import Delta, FinishReason, GenerateRequest, Prompt, Speculation, TokenLogprob, TokenSource, Usage

LOWEST_LOGPROB = -9999.0  # how OpenAI writes a probability of zero; JSON has no infinity


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as far as it has been generated."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    prompt: Prompt | None = None
    token_sources: list[TokenSource] = field(default_factory=list)
    decisions: list[Mapping[str, Any]] = field(default_factory=list)
    _calls: ToolCalls | None = None
    _texts: dict[str, list[str]] = field(default_factory=dict)  # further fields that come in pieces
    _values: dict[str, Any] = field(default_factory=dict)  # and those that come whole

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason or self.stop_reason
        self.prompt = delta.prompt or self.prompt
        self.token_sources.extend(delta.token_sources)
        self.decisions.extend(delta.decisions)
        for name, value in delta.extra.items():
            if name == "tool_calls":
                self._calls = self._calls or ToolCalls()
                self._calls.add(value)
            elif isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            else:
                self._values[name] = value

    def whole(self, index: int) -> Delta:
        """The choice as one delta, without its further fields."""
        one = Delta("".join(self.text), tuple(self.token_ids), tuple(self.logprobs), self.finish_reason, index=index)
        return replace(one, prompt=self.prompt, token_sources=tuple(self.token_sources))

    @property
    def extra(self) -> dict[str, Any]:
        """The further fields, put together at each use."""
        texts = {name: "".join(pieces) for name, pieces in self._texts.items()}
        return {**self._values, **texts, **({"tool_calls": self._calls.whole()} if self._calls else {})}


@dataclass(slots=True)
class Accumulator:
    """Assembles a whole answer from its deltas: the choices, and the fields that they share."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    speculation: Speculation | None = None

    def add(self, delta: Delta) -> None:
        self.choices.setdefault(delta.index, Choice()).add(delta)
        self.usage = delta.usage or self.usage
        self.speculation = delta.speculation or self.speculation

    def all(self) -> list[tuple[int, Choice]]:
        """The choices in order; an answer without any delta has one empty choice."""
        return sorted(self.choices.items()) or [(0, Choice())]


@dataclass(slots=True)
class ApiWriter:
    """Writes one answer in the form of its API: the chunks of a stream, or `body` after `add` for each delta.

    `stored`: the answer is stored, for later requests to continue.
    """

    holds_answer: ClassVar[bool] = False
    """Whether a stream's last chunk has the whole answer again."""
    named: ClassVar[bool] = False
    """Whether an event is named by the type of its chunk."""
    end: ClassVar[bytes] = DONE
    """What ends a stream, also one that failed."""
    stored: bool = field(default=False, init=False)
    answer: Accumulator = field(default_factory=Accumulator, init=False)

    def add(self, delta: Delta) -> None:
        self.answer.add(delta)

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        raise NotImplementedError

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The chunks of one delta: none if it is empty, two if it is the last one and the client requested usage."""
        raise NotImplementedError

    def close(self) -> Iterable[dict[str, Any]]:
        """The chunks after the last delta, before the answer is stored. Also called for a whole answer."""
        return ()

    def last(self) -> Iterable[dict[str, Any]]:
        """The chunks after the answer is stored."""
        return ()

    def failed(self, error: dict[str, Any], status: int, request_id: str) -> dict[str, Any]:
        """The chunk for an `error`, which has OpenAI's form, that broke a stream off."""
        return {"error": error}

    def own_name(self, param: str) -> str:
        """The name in the request of the field that errors of the backend call `param`."""
        return param


@dataclass(slots=True)
class ChunkWriter(ApiWriter):
    """What the writers of chats and completions share: the fields that each chunk repeats, the counts of the last."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    request: GenerateRequest
    format: AnswerFormat
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()), init=False)
    _ended: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def _wrap(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}
        return {**head, "choices": choices, **more}

    def _chunk(self, kind: str, choice: dict[str, Any], delta: Delta, **more: Any) -> Iterator[dict[str, Any]]:
        """The chunk of `choice`; after the end of the last choice also a usage chunk, if requested."""
        self._ended += delta.finish_reason is not None
        ends = delta.finish_reason is not None and self._ended == self.request.sampling.n
        null_usage = {"usage": None} if self.format.usage else {}
        at_end = speculation_member(delta.speculation)
        yield self._wrap(kind, [choice], **more, **null_usage, **(at_end if ends and not self.format.usage else {}))
        if ends and self.format.usage:
            yield self._wrap(kind, [], usage=usage_object(delta.usage or Usage()), **at_end, **self._metrics(delta))

    def _asked(self, one: Delta | Choice) -> dict[str, Any]:
        """The members of a choice that the client asked for besides what all get."""
        ids = {"token_ids": list(one.token_ids)} if self.format.token_ids else {}
        return ids | ({"token_sources": [*map(source_object, one.token_sources)]} if self.format.token_sources else {})

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        counts = speculation_member(self.answer.speculation)
        return self._wrap(
            self.kind, choices, usage=usage_object(self.answer.usage), **counts, **self._metrics(self.answer)
        )

    def _metrics(self, counted: Delta | Accumulator) -> dict[str, Any]:
        """vLLM's metrics of the request, which stand by the usage of a single choice."""
        done = counted.speculation
        if not isinstance(done, MeasuredSpeculation) or self.request.sampling.n > 1:
            return {}
        return {"metrics": {"speculative_decoding": done.metrics()}}


def source_object(token: TokenSource) -> dict[str, Any]:
    """A token and where it came from; what is not known of it is left out."""
    return {name: value for name, value in asdict(token).items() if value not in (None, ())}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object. It has prediction counts only if the request carried a prediction, and those of thoughts
    only if they were counted.
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


def speculation_member(speculation: Speculation | None) -> dict[str, Any]:
    """An answer's member `speculation`, if there is one: the fields of the class that the strategy reports."""
    if speculation is None:
        return {}
    members = asdict(speculation) | {"estimated_seconds_saved": round(speculation.estimated_seconds_saved, 6)}
    if isinstance(speculation, MeasuredSpeculation):
        members = {one.name: members[one.name] for one in fields(Speculation)}
    return {"speculation": members}


def thoughts_of(extra: Mapping[str, Any]) -> str:
    """The thoughts of a delta or a message, which have two names."""
    found = (extra.get(name) for name in THOUGHTS)
    return next((text for text in found if isinstance(text, str)), "")


@dataclass(slots=True)
class ChatWriter(ChunkWriter):
    """Writes chat answers. The first chunk of each choice carries the role."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    _begun: set[int] = field(default_factory=set, init=False)

    def body(self) -> dict[str, Any]:
        choices = [self._choice(index, choice) for index, choice in self.answer.all()]
        return self._whole(choices) | self._prompt(self.answer.all()[0][1].prompt)

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        begins = delta.index not in self._begun
        asked = self._asked(delta)
        if not (delta.text or delta.logprobs or delta.extra or delta.finish_reason or any(asked.values()) or begins):
            return
        self._begun.add(delta.index)
        message: dict[str, Any] = {"role": "assistant", "content": ""} if begins else {}
        if delta.text:
            message["content"] = delta.text
        choice = {
            "index": delta.index,
            "delta": {**message, **delta.extra},
            "logprobs": _logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            **asked,
        }
        yield from self._chunk("chat.completion.chunk", choice, delta, **self._prompt(delta.prompt))

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        content = None if not text and choice.extra.get("tool_calls") else text
        return {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None, **choice.extra},
            "logprobs": _logprobs(choice.logprobs) if self.request.sampling.logprobs else None,
            "finish_reason": choice.finish_reason,
            **self._asked(choice),
        }

    def _prompt(self, prompt: Prompt | None) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompt.token_ids)} if prompt and self.format.token_ids else {}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_entry(token) | {"top_logprobs": [_entry(top) for top in token.top]} for token in tokens]}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    text = token.text
    return {"token": text, "logprob": clamped(token.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def clamped(logprob: float) -> float:
    return max(LOWEST_LOGPROB, min(logprob, 0.0))  # in this order NaN is the lowest, too
