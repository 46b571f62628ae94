"""`/v1/completions`: its request fields and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.proxy.answer import Envelope, Gathered, clamped
from agentspec.proxy.fields import Fields, count, string, take_sampling, take_stream, token_ids, wrong
from agentspec.proxy.labels import Caller
from agentspec.types import Delta, GenerateRequest, TokenLogprob

MAX_TOP_LOGPROBS = 20


def parse(body: Mapping[str, Any], caller: Caller) -> tuple[GenerateRequest, bool, bool]:
    """The request, whether to stream, and whether the stream ends with the usage.

    Raises `InvalidRequestError` with `param` for every field that is wrong or that the local engine cannot honour.
    """
    fields = Fields(body)
    model = fields.take("model", string, "")
    prompt = fields.take("prompt", _prompt, None)
    if prompt is None:
        raise InvalidRequestError("prompt is missing", param="prompt")
    stream, include_usage = take_stream(fields)
    top_logprobs = fields.take("logprobs", _top_logprobs, None)
    sampling = take_sampling(
        fields,
        max_tokens=fields.take("max_tokens", count, None),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
    )
    for name, value in (("n", 1), ("best_of", 1), ("echo", False), ("suffix", "")):
        fields.take_only(name, value)
    fields.finish()
    text = prompt if isinstance(prompt, str) else None
    ids = None if isinstance(prompt, str) else prompt
    request = GenerateRequest(model=model, text=text, token_ids=ids, sampling=sampling, **caller.request_fields)
    return request, stream, include_usage


@dataclass(slots=True)
class CompletionWriter:
    """Writes text completions. `text_offset` counts characters from the start of the answer."""

    model: str
    include_usage: bool
    include_speculation: bool
    logprobs: bool
    _envelope: Envelope = field(init=False)
    _offset: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._envelope = Envelope("text_completion", self.model, "cmpl", self.include_usage, self.include_speculation)

    def body(self, answer: Gathered) -> dict[str, Any]:
        return self._envelope.whole(self._choice("".join(answer.text), answer.logprobs, answer.finish_reason), answer)

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.text or delta.logprobs or delta.finish_reason:
            yield from self._envelope.chunk(self._choice(delta.text, delta.logprobs, delta.finish_reason), delta)

    def _choice(self, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str | None) -> dict[str, Any]:
        shown = self._logprobs(logprobs) if self.logprobs else None
        return {"index": 0, "text": text, "logprobs": shown, "finish_reason": finish_reason}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [clamped(token.logprob) for token in tokens],
            "top_logprobs": [{top.text: clamped(top.logprob) for top in token.top} for token in tokens],
            "text_offset": offsets,
        }


def _top_logprobs(name: str, value: Any) -> int:
    if count(name, value) > MAX_TOP_LOGPROBS:
        raise InvalidRequestError(f"{name} must be at most {MAX_TOP_LOGPROBS}", param=name)
    return int(value)


def _prompt(name: str, value: Any) -> str | tuple[int, ...]:
    """A string or an array of token ids; either may stand alone in an array, as some clients send it."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return string(name, value)
    if not isinstance(value, list):
        raise wrong(name, "a string or an array of token ids", value)
    if any(isinstance(item, (str, list)) for item in value):
        raise InvalidRequestError("this model answers one prompt a request; send them one by one", param=name)
    if not value:
        raise InvalidRequestError("prompt must not be empty", param=name)
    return token_ids(name, value)
