"""A scripted model that reasons, as the models of strategies are asked to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from agentspec.reasoning.settings import DelegationSettings
from agentspec.testing import FakeBackend, Script
from agentspec.types import GenerateRequest

_QUOTED = re.compile(r"<<<\n(.*?)\n>>>", re.DOTALL)
_NUMBERED = re.compile(r"<start_s[12]>\n(.*?)\n<end_s[12]>", re.DOTALL)


Kind = TypeVar("Kind", bound=type[DelegationSettings])


def having(kind: Kind, **constants: Any) -> Kind:
    """Settings of that kind with other constants of the strategy, such as `answer_marks`."""
    return type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__, **constants})  # type: ignore[return-value]


class ThinkingModel(FakeBackend):
    """A `FakeBackend` that reasons: its output depends on its prompt alone, as a greedy model's output does.

    `step` gets the thinking so far and returns its continuation, which a request's stop strings cut to one step. To a
    judge's prompt the model answers `score(step)`, or, to the question whether two steps are the same, the verdict of
    `same(draft, own)`. After `</think>` it writes `answer`.
    """

    def __init__(
        self,
        step: Callable[[str], Script],
        *,
        score: Callable[[str], Script] = lambda step: "9",
        same: Callable[[str, str], bool] = lambda draft, own: draft == own,
        answer: Script = "The answer is four.",
        **options: Any,
    ) -> None:
        super().__init__(self._respond, **options)
        self._step, self._score, self._same, self._said = step, score, same, answer

    @property
    def asked(self) -> list[str]:
        """The prompts of the requests that used this model as a judge."""
        return [prompt for request in self.requests if _is_question(prompt := self.prompt_text(request))]

    def _prompt(self, request: GenerateRequest) -> list[int]:
        return self.encode(self.prompt_text(request))

    def _respond(self, request: GenerateRequest) -> Script:
        prompt = self.prompt_text(request)
        if _is_question(prompt):
            if prompt.endswith("["):
                return "aligned" if self._same(*_compared(prompt)) else "unaligned"
            return self._score(_judged(prompt))
        return self._said if "</think>" in prompt else self._step(prompt.rpartition("<think>\n")[2])


def _compared(prompt: str) -> Sequence[str]:
    """The drafted step and the base model's own, of the question whether they mean the same."""
    numbered: list[str] = _NUMBERED.findall(prompt)
    return numbered[:-3:-1] or _QUOTED.findall(prompt)[-2:]


def _judged(prompt: str) -> str:
    """The step that a judge is asked about: quoted, or the last one of the thinking."""
    if quoted := _QUOTED.findall(prompt):
        return str(quoted[-1])
    thinking = re.split(r"<\||\n\nUser: ", prompt.rpartition("<think>\n")[2])[0]  # up to the judge's turn
    return thinking.removesuffix("\n\n").rpartition("\n\n")[2].strip()


def _is_question(prompt: str) -> bool:
    return prompt.endswith(("score is: ", "["))
