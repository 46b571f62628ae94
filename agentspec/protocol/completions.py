"""Text completions: parses the bodies of `/v1/completions`, and writes their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.requests import MAX_TOP_LOGPROBS, AnswerFormat, GenerationBody
from agentspec.protocol.responses import ChunkWriter, clamped
from agentspec.protocol.validation import TEXT, Count, TokenIds, only, validated, wrong_type
from agentspec.types import Delta, GenerateRequest, SamplingParams, TokenLogprob


class _CompletionBody(GenerationBody):
    prompt: Any = None
    logprobs: Count | None = None
    echo: Annotated[Any, only(False)] = None
    suffix: Annotated[Any, only("")] = None


def parse_completion(body: Mapping[str, Any]) -> tuple[GenerateRequest, AnswerFormat]:
    """Parse a request to complete text or token ids. Raises what `parse_chat` raises."""
    fields = _CompletionBody.parse(body)
    prompt = _prompt(fields.prompt)
    form = fields.answer_format()
    count = fields.logprobs
    if count is not None and count > MAX_TOP_LOGPROBS:
        raise InvalidRequestError(f"logprobs must be at most {MAX_TOP_LOGPROBS}", param="logprobs")
    sampling = SamplingParams(**fields.sampling(), logprobs=count is not None, top_logprobs=count or 0)
    request = GenerateRequest(
        model=fields.model, **prompt, sampling=sampling, return_prompt=form.token_ids, **fields.service()
    )
    return request, form


_TOKEN_IDS: TypeAdapter[Any] = TypeAdapter(TokenIds)


def _prompt(value: Any) -> dict[str, Any]:
    """The prompt: a string or an array of token ids; some clients wrap either in an array of one element."""
    if value is None:
        raise InvalidRequestError("prompt is missing", param="prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return {"text": validated(TEXT, value, "prompt")}
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string or an array of token ids", value)
    if any(isinstance(item, (str, list)) for item in value):
        raise InvalidRequestError("prompt must be a string or an array of token ids here", param="prompt")
    if not value:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    return {"token_ids": validated(_TOKEN_IDS, value, "prompt")}


@dataclass(slots=True)
class CompletionWriter(ChunkWriter):
    """Writes text completions. `text_offset` counts characters from the start of the choice's text.

    Of several prompts, the choices of each come one after the other.
    """

    prefix = "cmpl"
    kind = "text_completion"
    _offsets: dict[int, int] = field(default_factory=dict, init=False)

    def body(self) -> dict[str, Any]:
        return self._whole([self._choice(one.whole(index)) for index, one in self.answer.all()])

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.text or delta.logprobs or delta.finish_reason or any(self._asked(delta).values()):
            yield from self._chunk(self.kind, self._choice(delta), delta)

    def _choice(self, delta: Delta) -> dict[str, Any]:
        prompt = {"prompt_token_ids": list(delta.prompt.token_ids)} if delta.prompt and self.format.token_ids else {}
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, delta.logprobs) if self.request.sampling.logprobs else None,
            "finish_reason": delta.finish_reason,
            **self._asked(delta),
            **prompt,
        }

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [clamped(token.logprob) for token in tokens],
            "top_logprobs": [{top.text: clamped(top.logprob) for top in token.top} for token in tokens],
            "text_offset": offsets,
        }
