"""What a local engine can do beside `Backend`, and an endpoint cannot: go on with an answer, accept drafts lossily,
hold calls of tools to their parameters, read ahead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentspec.backends.base import Backend
from agentspec.types import Delta, GenerateRequest, LossyAcceptance


class ParsesAnswer(Protocol):
    """Parses one answer as it grows: separates thoughts and tool calls from its text."""

    def parse(self, delta: Delta) -> Delta: ...


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """How to read answers to a request: `decode` tokens with the marks that `parser()`, one for each answer, needs."""

    parser: Callable[[], ParsesAnswer]
    decode: Callable[[Sequence[int]], str]


@runtime_checkable
class ContinuesAnswers(Backend, Protocol):
    """A backend that goes on with an answer behind any prompt, keeping the rules of the whole answer: penalties, bad
    words, its form.
    """

    def continue_answer(
        self, request: GenerateRequest, prompt: Sequence[int], answer: Sequence[int]
    ) -> AsyncIterator[Delta]:
        """Yield up to `max_tokens` tokens more of the `answer` so far to `request`, whose prompt reads `prompt`.

        The text is not parsed. Raises as `generate` does.
        """
        ...

    def answer_reader(self, request: GenerateRequest, prompt: Sequence[int]) -> AnswerReader:
        """How to read the whole answer to `request`, whose prompt ends in the tokens `prompt`: by its end, thoughts are
        expected or not.
        """
        ...


@runtime_checkable
class AcceptsLossily(Backend, Protocol):
    """A backend that verifies drafts itself and can do so by a `LossyAcceptance`, where a request carries one."""

    def prepare_acceptance(self, rule: LossyAcceptance) -> None:
        """Load what `rule` needs, before any request carries it. Raises `ConfigurationError` if it cannot be used."""
        ...
