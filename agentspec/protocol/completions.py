"""Text completions: parses the bodies of `/v1/completions`, and writes their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.requests import MAX_TOP_LOGPROBS, AnswerFormat, GenerationBody
from agentspec.protocol.responses import Accumulator, ChunkBuilder, clamped
from agentspec.protocol.validation import Count, Text, TokenIds, must, only, validated, wrong_type
from agentspec.types import MAX_CHOICES, Delta, GenerateRequest, Prompt, SamplingParams, TokenLogprob


class _CompletionBody(GenerationBody):
    prompt: Any = None
    logprobs: (
        Annotated[Count, must(lambda count: count <= MAX_TOP_LOGPROBS, f" must be at most {MAX_TOP_LOGPROBS}")] | None
    ) = None
    echo: bool = False
    suffix: Annotated[Any, only("")] = None


def parse_completion(body: Mapping[str, Any]) -> tuple[GenerateRequest, AnswerFormat]:
    """Parse a request to complete text or token ids. Raises what `parse_chat` raises."""
    fields = _CompletionBody.parse(body)
    prompt = _prompt(fields.prompt)
    stream = fields.stream_format()
    count = fields.logprobs
    sampling = SamplingParams(**fields.sampling(), logprobs=count is not None, top_logprobs=count or 0)
    form = AnswerFormat(**stream, token_ids=bool(fields.return_token_ids), echo=fields.echo)
    if form.echo and sampling.logprobs:
        message = "echo and logprobs together are not supported by this model: leave one of them out"
        raise InvalidRequestError(message, param="echo")
    request = GenerateRequest(
        model=fields.model,
        **prompt,
        sampling=sampling,
        return_prompt=form.echo or form.token_ids,
        **fields.service(),
    )
    return request, form


_TEXT: TypeAdapter[str] = TypeAdapter(Text)
_TOKEN_IDS: TypeAdapter[Any] = TypeAdapter(TokenIds)


def _prompt(value: Any) -> dict[str, Any]:
    """The prompt: a string or an array of token ids; some clients wrap either in an array of one element."""
    if value is None:
        raise InvalidRequestError("prompt is missing", param="prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return {"text": validated(_TEXT, value, "prompt")}
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string or an array of token ids", value)
    if any(isinstance(item, (str, list)) for item in value):
        raise InvalidRequestError("prompt must be a string or an array of token ids here", param="prompt")
    if not value:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    return {"token_ids": validated(_TOKEN_IDS, value, "prompt")}


@dataclass(slots=True)
class CompletionWriter:
    """Writes text completions. `text_offset` counts characters from the start of the choice's text.

    With `echo` every choice begins with the prompt. Of several prompts, each has `per_prompt` choices, and theirs come
    one after the other.
    """

    request: GenerateRequest
    format: AnswerFormat
    per_prompt: int = MAX_CHOICES
    _builder: ChunkBuilder = field(init=False)
    _offsets: dict[int, int] = field(default_factory=dict, init=False)
    _prompts: dict[int, Prompt] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._builder = ChunkBuilder("text_completion", "cmpl", self.request, self.format)

    def body(self, answer: Accumulator) -> dict[str, Any]:
        for index, prompt in answer.prompts.items():
            self._prompts[index // self.per_prompt] = prompt
        choices = [
            self._choice(index, "".join(one.text), one.token_ids, one.logprobs, one.finish_reason)
            for index, one in answer.all()
        ]
        return self._builder.whole(choices, answer)

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.prompt is not None:
            self._prompts[delta.index // self.per_prompt] = delta.prompt
        tokens = self.format.token_ids and delta.token_ids
        echoed = self.format.echo and delta.index not in self._offsets
        if delta.text or delta.logprobs or delta.finish_reason or tokens or echoed:
            choice = self._choice(delta.index, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason)
            yield from self._builder.chunk(choice, delta)

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
        known = self._prompts.get(index // self.per_prompt)
        prompt = known if begins and known is not None else Prompt()
        return {
            "index": index,
            "text": (prompt.text if self.format.echo else "") + text,
            "logprobs": self._logprobs(index, logprobs) if self.request.sampling.logprobs else None,
            "finish_reason": finish_reason,
            **({"token_ids": list(token_ids)} if self.format.token_ids else {}),
            **({"prompt_token_ids": list(prompt.token_ids)} if self.format.token_ids and begins else {}),
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
