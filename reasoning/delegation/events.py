"""The events of a delegating strategy, one for each decision; `backend` makes deltas, counts and traces of them."""

from __future__ import annotations

from dataclasses import dataclass

from agentspec.reasoning.delegation.steps import Author, Step


@dataclass(frozen=True, slots=True)
class ThinkingText:
    """Final text of the thinking, which the client receives at once."""

    author: Author
    text: str


@dataclass(frozen=True, slots=True)
class Proposed:
    """A model wrote a step that is neither accepted nor rejected yet."""

    step: Step


@dataclass(frozen=True, slots=True)
class Scored:
    """The judge's verdict on the step proposed last. `value` is compared with the threshold."""

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
    """A rule makes the base model continue the thinking."""

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
