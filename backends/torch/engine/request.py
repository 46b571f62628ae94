"""A request prepared for the engine, and the text of its answer as tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentspec.backends.torch.engine.logprobs import PromptScorer
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.text import Detokenizer, StopScanner
from agentspec.types import Delta, FinishReason, GenerateRequest, Prompt, SamplingParams


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One choice of a request, prepared for the engine; `original` is the request as the client sent it.

    The engine's thread calls `deliver`, which must not block.
    """

    original: GenerateRequest
    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    prediction: list[int] | None
    deliver: Callable[[Delta | Exception], None]
    cancelled: bool = False
    forgotten: bool = False
    """Whether a deletion came while it was open: nothing of it is kept."""
    constraints: ConstraintSpec = field(default_factory=ConstraintSpec)
    shares_prompt: bool = False
    answered: int = 0
    """How many tokens at the end of `prompt` belong to the answer already."""

    @property
    def sampling(self) -> SamplingParams:
        return self.original.sampling

    @property
    def priority(self) -> int:
        return self.original.priority

    @property
    def tenant(self) -> str:
        return self.original.tenant


class AnswerText:
    """The text of one answer as its tokens are added; `finish` says why it ended, and is None before."""

    def __init__(self, request: EngineRequest, tokenizer: TokenizerAdapter) -> None:
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self._request = request
        self._detokenizer = Detokenizer(tokenizer.decoder(request.constraints.shown), request.prompt)
        self._scanner = StopScanner(request.sampling.stop)
        self._fresh: list[str] = []

    def add(self, token: int) -> bool:
        """Append `token` to the answer; True if the answer is finished with it."""
        self.num_tokens += 1
        if token in self._request.stop_ids:
            self.finish = "stop"
        else:
            self._fresh.append(self._scanned(self._detokenizer.feed(token)))
            if self._scanner.stopped:
                self.finish = "stop"
            elif self.num_tokens >= self._request.max_tokens:
                self.finish = "length"
        return self.finish is not None

    def _scanned(self, text: str) -> str:
        """The part of `text` that can be passed on. A stop string counts only if it ends after `min_tokens` tokens."""
        return self._scanner.feed(text, counts=self.num_tokens > self._request.sampling.min_tokens)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the answer; None if none did."""
        return self._scanner.matched

    def take(self) -> str:
        """The text added since the last call; when the answer is finished, also the text that was held back."""
        if self.finish is not None and not self._scanner.stopped:
            self._fresh.append(self._scanned(self._detokenizer.finish()))
            self._fresh.append(self._scanner.finish())
            if self._scanner.stopped:  # by a character that more tokens would have completed
                self.finish = "stop"
        text, self._fresh = "".join(self._fresh), []
        return text


def prompt_of(request: EngineRequest, tokenizer: TokenizerAdapter, scorer: PromptScorer | None = None) -> Prompt:
    """The prompt as the model reads it, with the log-probabilities of its tokens if they were scored."""
    ids, text = tuple(request.prompt), request.original.text
    shown = tokenizer.decode(ids) if text is None else text
    return Prompt(shown, ids, None if scorer is None else tuple(scorer.entries))


def prompt_length(request: GenerateRequest) -> int:
    """The characters of the prompt, or the number of its token ids."""
    if request.messages is None:
        return len(request.text or request.token_ids or ())
    length = 0
    containers: list[Any] = [request.messages, request.tools]
    for one in containers:
        for item in one.values() if isinstance(one, Mapping) else one:
            if isinstance(item, str):
                length += len(item)
            elif isinstance(item, (Mapping, list, tuple)):
                containers.append(item)
    return length
