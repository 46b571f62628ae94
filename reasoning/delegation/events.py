"""Every decision of a strategy, as it happens: what the shell turns into an answer, a count and a trace."""

from __future__ import annotations

from dataclasses import dataclass

from agentspec.reasoning.delegation.steps import Author, Step


@dataclass(frozen=True, slots=True)
class ThinkingText:
    """Text that is final: it goes to the client now."""

    author: Author
    text: str


@dataclass(frozen=True, slots=True)
class Proposed:
    """A model wrote a step that is not decided yet."""

    step: Step


@dataclass(frozen=True, slots=True)
class Scored:
    """The judge's verdict on the step proposed last. `value` is what the threshold is compared with."""

    value: float
    accepted: bool
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The step is part of the thinking."""

    step: Step


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The base model's `step` is part of the thinking in place of `rejected`."""

    step: Step
    rejected: Step


@dataclass(frozen=True, slots=True)
class Triggered:
    """A rule lets the base model write on."""

    rule: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A model failed; the rest of this answer goes on without it."""

    role: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The thinking is over; what follows is the answer."""

    reason: str


Event = ThinkingText | Proposed | Scored | Accepted | Rewritten | Triggered | Failed | Ended
