"""`/v1/completions`: its request fields and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.fields import (
    Fields,
    boolean,
    count,
    string,
    take_sampling,
    take_service,
    take_stream,
    token_ids,
    wrong,
)
from agentspec.proxy.auth import Caller
from agentspec.proxy.responses import Envelope, Gathered, clamped, prompt_logprobs
from agentspec.types import Delta, GenerateRequest, Prompt, TokenLogprob

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
    if stream and sampling.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs needs stream = false", param="prompt_logprobs")
    echo = fields.take("echo", boolean, False)
    if echo and sampling.logprobs and sampling.prompt_logprobs is None:
        sampling = replace(sampling, prompt_logprobs=sampling.top_logprobs)
    return_token_ids = fields.take("return_token_ids", boolean, False)
    request = GenerateRequest(
        model=model,
        text=prompt if isinstance(prompt, str) else None,
        token_ids=None if isinstance(prompt, str) else prompt,
        sampling=sampling,
        return_prompt=echo or return_token_ids,
        **caller.request_fields,
    )
    request = replace(request, **take_service(fields, request))
    fields.take_only("best_of", sampling.n)
    fields.take_only("suffix", "")
    fields.finish()
    return request, stream, include_usage


@dataclass(slots=True)
class CompletionWriter:
    """Writes text completions. `text_offset` counts characters from the start of the choice's text.

    With `echo` the prompt stands before every choice, with its tokens' log-probabilities where they were asked for.
    """

    model: str
    include_usage: bool
    include_speculation: bool
    logprobs: bool
    token_ids: bool = False
    echo: bool = False
    prompt_logprobs: bool = False
    choices: int = 1
    _envelope: Envelope = field(init=False)
    _offsets: dict[int, int] = field(default_factory=dict, init=False)
    _prompt: Prompt | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._envelope = Envelope(
            "text_completion", self.model, "cmpl", self.include_usage, self.include_speculation, self.choices
        )

    def body(self, answer: Gathered) -> dict[str, Any]:
        self._prompt = answer.prompt
        choices = [
            self._choice(index, "".join(said.text), said.token_ids, said.logprobs, said.finish_reason)
            for index, said in answer.all()
        ]
        return self._envelope.whole(choices, answer)

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._prompt = delta.prompt or self._prompt
        tokens = self.token_ids and delta.token_ids
        echoed = self.echo and delta.index not in self._offsets
        if delta.text or delta.logprobs or delta.finish_reason or tokens or echoed:
            choice = self._choice(delta.index, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason)
            yield from self._envelope.chunk(choice, delta)

    def _choice(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        finish_reason: str | None,
    ) -> dict[str, Any]:
        begins = index not in self._offsets
        self._offsets.setdefault(index, 0)
        prompt = self._prompt if begins and self._prompt is not None else Prompt()
        before = self._echoed(index, prompt) if self.echo and begins else None
        shown = self._logprobs(index, logprobs) if self.logprobs else None
        if shown and before:
            shown = {name: before[name] + values for name, values in shown.items()}
        return {
            "index": index,
            "text": (prompt.text if self.echo else "") + text,
            "logprobs": shown,
            "finish_reason": finish_reason,
            **({"token_ids": list(token_ids)} if self.token_ids else {}),
            **({"prompt_token_ids": list(prompt.token_ids)} if self.token_ids and begins else {}),
            **({"prompt_logprobs": prompt_logprobs(prompt)} if self.prompt_logprobs and begins else {}),
        }

    def _echoed(self, index: int, prompt: Prompt) -> dict[str, list[Any]] | None:
        """The prompt's entries; its first token, which nothing precedes, has no log-probability."""
        if prompt.logprobs is None:
            return None
        known = self._logprobs(index, prompt.logprobs)
        first = prompt.text[: max(0, len(prompt.text) - self._offsets[index])]
        self._offsets[index] += len(first)
        return {
            "tokens": [first, *known["tokens"]],
            "token_logprobs": [None, *known["token_logprobs"]],
            "top_logprobs": [None, *known["top_logprobs"]],
            "text_offset": [0, *(offset + len(first) for offset in known["text_offset"])],
        }

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.text)
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
