"""Writes the answers of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.responses import Accumulator, Choice, ChunkBuilder, clamped, prompt_logprobs
from agentspec.types import Delta, GenerateRequest, Prompt, TokenLogprob


@dataclass(slots=True)
class ChatWriter:
    """Writes chat answers. The first chunk of each choice carries the role."""

    request: GenerateRequest
    format: AnswerFormat
    include_speculation: bool = True
    _builder: ChunkBuilder = field(init=False)
    _begun: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._builder = ChunkBuilder("", "chatcmpl", self.request, self.format, self.include_speculation)

    def body(self, answer: Accumulator) -> dict[str, Any]:
        self._builder.kind = "chat.completion"
        choices = [self._whole(index, choice) for index, choice in answer.all()]
        return self._builder.whole(choices, answer) | self._prompt(answer.prompt)

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._builder.kind = "chat.completion.chunk"
        begins = delta.index not in self._begun
        tokens = self.format.token_ids and delta.token_ids
        if not (delta.text or delta.logprobs or delta.extra or delta.finish_reason or tokens or begins):
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
            **({"token_ids": list(delta.token_ids)} if self.format.token_ids else {}),
        }
        yield from self._builder.chunk(choice, delta, **self._prompt(delta.prompt))

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        content = None if not text and choice.extra.get("tool_calls") else text
        return {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None, **choice.extra},
            "logprobs": _logprobs(choice.logprobs) if self.request.sampling.logprobs else None,
            "finish_reason": choice.finish_reason,
            **({"token_ids": choice.token_ids} if self.format.token_ids else {}),
        }

    def _prompt(self, prompt: Prompt | None) -> dict[str, Any]:
        if prompt is None:
            return {}
        ids = {"prompt_token_ids": list(prompt.token_ids)} if self.format.token_ids else {}
        return ids if prompt.logprobs is None else {**ids, "prompt_logprobs": prompt_logprobs(prompt)}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_entry(token) | {"top_logprobs": [_entry(top) for top in token.top]} for token in tokens]}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    text = token.text
    return {"token": text, "logprob": clamped(token.logprob), "bytes": list(text.encode("utf-8", "replace"))}
