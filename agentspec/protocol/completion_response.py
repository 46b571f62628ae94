"""Writes the answers of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.responses import Accumulator, ChunkBuilder, clamped, prompt_logprobs
from agentspec.types import MAX_CHOICES, Delta, GenerateRequest, Prompt, TokenLogprob


@dataclass(slots=True)
class CompletionWriter:
    """Writes text completions. `text_offset` counts characters from the start of the choice's text.

    With `echo` every choice begins with the prompt, and with the log-probabilities of its tokens if requested. Of
    several prompts, each has `per_prompt` choices, and theirs come one after the other.
    """

    request: GenerateRequest
    format: AnswerFormat
    include_speculation: bool = True
    per_prompt: int = MAX_CHOICES
    _builder: ChunkBuilder = field(init=False)
    _offsets: dict[int, int] = field(default_factory=dict, init=False)
    _prompts: dict[int, Prompt] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._builder = ChunkBuilder("text_completion", "cmpl", self.request, self.format, self.include_speculation)

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
        before = self._echoed(index, prompt) if self.format.echo and begins else None
        shown = self._logprobs(index, logprobs) if self.request.sampling.logprobs else None
        if shown and before:
            shown = {name: before[name] + values for name, values in shown.items()}
        return {
            "index": index,
            "text": (prompt.text if self.format.echo else "") + text,
            "logprobs": shown,
            "finish_reason": finish_reason,
            **({"token_ids": list(token_ids)} if self.format.token_ids else {}),
            **({"prompt_token_ids": list(prompt.token_ids)} if self.format.token_ids and begins else {}),
            **({"prompt_logprobs": prompt_logprobs(prompt)} if self.format.prompt_logprobs and begins else {}),
        }

    def _echoed(self, index: int, prompt: Prompt) -> dict[str, list[Any]] | None:
        """The log-probability entries of the prompt; its first token, which nothing precedes, has None."""
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
