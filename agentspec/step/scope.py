"""The scope that model calls are made in: their labels, and their policy.

A scope is a context variable, so it follows asyncio tasks, and threads if `keep_labels` wraps their work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import ParamSpec, TypeVar

from agentspec.errors import InvalidRequestError
from agentspec.protocol.policy import StepPolicy
from agentspec.telemetry import tracing
from agentspec.types import Labels

P = ParamSpec("P")
R = TypeVar("R")

SHORTEST_S = 0.001  # what is left of a deadline that is over: a deadline is a goal, and refuses nothing


@dataclass(frozen=True, slots=True)
class CallScope:
    """`deadline` is a time of `time.monotonic`; `policy` holds everything else that is asked of the calls.

    `early_tools` counts the tools whose early result the agent has used since its last call.
    """

    labels: Labels = field(default_factory=Labels)
    policy: StepPolicy = field(default_factory=StepPolicy)
    deadline: float | None = None
    early_tools: int = 0

    def narrowed(self, labels: Labels, policy: StepPolicy) -> CallScope:
        """The scope inside this one: what `labels` and `policy` leave open stays, the earlier deadline counts.

        Raises `InvalidRequestError` for a label that is no text.
        """
        require_text(labels)
        mine = None if policy.deadline_s is None else time.monotonic() + policy.deadline_s
        ends = [at for at in (self.deadline, mine) if at is not None]
        return CallScope(
            Labels(
                labels.session or self.labels.session,
                labels.workflow or self.labels.workflow,
                labels.step or self.labels.step,
            ),
            replace(policy, deadline_s=None).inside(self.policy),
            min(ends, default=None),
        )


def require_text(labels: Labels) -> None:
    """Raise `InvalidRequestError` for a label that is no text, such as a UUID."""
    for name in ("session", "workflow", "step"):
        if not isinstance(value := getattr(labels, name), str | None):
            raise InvalidRequestError(f"{name} must be a text, not {value!r}: write str(...)", param=name)


current: ContextVar[CallScope] = ContextVar("agentspec_scope", default=CallScope())  # noqa: B039  (a CallScope is frozen)


@contextmanager
def workflow(
    name: str | None = None,
    *,
    session: str | None = None,
    speculation: bool | None = None,
    deadline: float | None = None,
    priority: int | None = None,
    store: bool | None = None,
    policy: StepPolicy | None = None,
) -> Iterator[None]:
    """Label every model call inside the block with this workflow and, if given, session.

    `deadline` is the time in seconds from now in which the workflow should be over. It is a goal: calls carry what is
    left of it, and none is refused. `policy` asks for more of the calls. Raises `InvalidRequestError` for a value
    outside its range.
    """
    asked = StepPolicy(deadline_s=deadline, priority=priority, store=store, speculation=speculation)
    asked = asked if policy is None else asked.inside(policy)
    scope = current.get().narrowed(Labels(session, name), asked)
    named = {"gen_ai.workflow.name": scope.labels.workflow, "gen_ai.conversation.id": scope.labels.session}
    with entered(scope), tracing.span("invoke_workflow", scope.labels.workflow, named):
        yield


@contextmanager
def entered(scope: CallScope) -> Iterator[None]:
    """Make calls inside the block in `scope`."""
    around = current.get()
    current.set(scope)
    try:
        yield
    finally:
        current.set(around)  # not reset(): a block in an asynchronous generator may end in another context


def current_labels() -> Labels:
    """The labels that a model call made now would carry."""
    return current.get().labels


def current_policy() -> StepPolicy:
    """What the surrounding steps and workflows ask of a model call made now; `deadline_s` is the time that is left."""
    scope = current.get()
    if scope.deadline is None:
        return scope.policy
    return replace(scope.policy, deadline_s=max(SHORTEST_S, scope.deadline - time.monotonic()))


def current_model() -> str | None:
    """The model that the surrounding steps request; None if no step names one."""
    return current.get().policy.model


def keep_labels(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with the labels, and all other context variables, of now, in whatever thread it is called.

    For thread pools: their threads begin without them: `pool.submit(keep_labels(work), item)`.
    """
    context = copy_context()

    @wraps(function)
    def in_context(*args: P.args, **kwargs: P.kwargs) -> R:
        return context.copy().run(function, *args, **kwargs)  # a copy: several threads may call it at once

    return in_context
