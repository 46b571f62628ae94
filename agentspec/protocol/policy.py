"""How the model calls of a step are to be served: as code says it, and as headers carry it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest

PREFIX = "x-agentspec-"
MAX_LABEL = 256
MAX_PRIORITY = 2**31 - 1
PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": (f"a name of 1 to {MAX_LABEL} characters", lambda one: isinstance(one, str) and 0 < len(one) <= MAX_LABEL),
    "deadline_s": (
        "a number above 0",
        lambda one: isinstance(one, (int, float)) and one is not True and 0 < one < math.inf,
    ),
    "priority": ("a whole number from 0, served first", lambda one: type(one) is int and 0 <= one <= MAX_PRIORITY),
    **dict.fromkeys(("store", "speculation"), ("true or false", lambda one: isinstance(one, bool))),
}


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """How the model calls of a step are served. Only `model` changes answers: it may name a strategy's, too. A value
    of None leaves the choice to the step or workflow around it.

    `deadline_s` is the seconds from now in which the step should be over: a goal, for which no call is refused. Calls
    with a lower `priority` are served first; 0 is the first. `store=False` stores no tokens, `speculation=False` drafts
    none.

    Raises `InvalidRequestError`, with `param` naming the field, for a value outside its range.
    """

    model: str | None = None
    deadline_s: float | None = None
    priority: int | None = None
    store: bool | None = None
    speculation: bool | None = None

    def __post_init__(self) -> None:
        for name, (rule, holds) in _RULES.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise InvalidRequestError(f"{name} must be {rule}, not {value!r:.100}", param=name)

    def inside(self, around: StepPolicy) -> StepPolicy:
        """This policy, with what it leaves open taken from the policy `around` it."""
        names = [field.name for field in fields(self)]
        return StepPolicy(**{name: _given(getattr(self, name), getattr(around, name)) for name in names})

    def headers(self) -> dict[str, str]:
        """The headers that carry all but the model, which a request names, and the switches, which have their own."""
        given = {"deadline-s": self.deadline_s, "priority": self.priority}
        return {PREFIX + name: f"{value:.10g}" for name, value in given.items() if value is not None}


ANY = StepPolicy()


def policy_of(request: GenerateRequest) -> StepPolicy:
    """What `request` asks of the gateway that may answer it."""
    return StepPolicy(deadline_s=request.deadline_s, priority=request.priority or None)


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
