"""A scripted model that reasons, as the models of strategies are asked to, and what a strategy makes of such models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import anyio

from agentspec.backends.base import Backend, Capabilities
from agentspec.protocol.speculation import StepSpeculation
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.settings import DelegationSettings
from agentspec.reasoning.strategy import Dependencies, ModelRef
from agentspec.testing import FakeBackend, Script
from agentspec.types import Delta, GenerateRequest, SamplingParams

IDS = Capabilities(token_ids=True, logprobs=True)
MESSAGES = Capabilities(continue_final=True, logprobs=True)
ASK = GenerateRequest(
    "fast", messages=[{"role": "user", "content": "Two plus two?"}], sampling=SamplingParams(temperature=0.0)
)

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
                own, draft = _NUMBERED.findall(prompt)[-2:]
                return "aligned" if self._same(draft, own) else "unaligned"
            return self._score(_judged(prompt))
        return self._said if "</think>" in prompt else self._step(prompt.rpartition("<think>\n")[2])


def _judged(prompt: str) -> str:
    """The step that a judge is asked about: the last one of the thinking."""
    thinking = prompt.rpartition("<think>\n")[2].partition("<|")[0]  # up to the judge's turn
    return thinking.removesuffix("\n\n").rpartition("\n\n")[2].strip()


def _is_question(prompt: str) -> bool:
    return prompt.endswith("score is: ") or (prompt.endswith("[") and "<end_s2>" in prompt)


def delegating(
    settings: DelegationSettings, *, base: Backend, small: Backend, judge: Backend | None = None
) -> DelegationBackend:
    """The strategy over backends that are open; the names in `settings` are used as the models' names."""
    if judge is not None:
        settings = settings.model_copy(update={"judge": "judge"})
    models: dict[str, Any] = {settings.small: small, settings.base: base, "judge": judge}
    found = Dependencies(lambda name: ModelRef(models[name], name), models.__getitem__)
    return DelegationBackend.open("fast", settings, found)


@dataclass
class Thought:
    """What a strategy did for one request: the deltas of its answer, which have its decisions."""

    deltas: list[Delta]

    @property
    def text(self) -> str:
        return "".join(delta.extra.get("reasoning", "") for delta in self.deltas)

    @property
    def answer(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def figures(self) -> StepSpeculation:
        figures = self.deltas[-1].speculation
        assert isinstance(figures, StepSpeculation)
        return figures

    @property
    def ended(self) -> str:
        return self.figures.ended

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [dict(one) for delta in self.deltas for one in delta.decisions if one["event"] in kinds]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record["step"] for record in self.events("accepted", "rewritten")]

    @property
    def kept(self) -> list[str]:
        """The steps that stayed and have text: who wrote each, "s " or "b ", and its text."""
        return [f"{step['author'][0]} {step['text']}" for step in self.steps if step["text"]]


async def thought(backend: DelegationBackend, request: GenerateRequest = ASK) -> Thought:
    return Thought([delta async for delta in backend.generate(replace(request, token_sources=True))])


def thinks(settings: DelegationSettings, request: GenerateRequest = ASK, **models: Any) -> Thought:
    """What the strategy thinks with these models, on an event loop of its own; no call is left running."""
    found = anyio.run(thought, delegating(settings, **models), request)
    assert not any(getattr(model, "active", 0) for model in models.values())
    return found
