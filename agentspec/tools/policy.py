"""Which tools may run before the model asks for them, and for whom."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection
from dataclasses import dataclass

from agentspec.errors import ConfigurationError

_log = logging.getLogger(__name__)

DEFAULT_AGE = 30.0
_NEAR = 0.8  # from this ratio on difflib takes one name for a misspelt other


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool. `injected`: it needs approval, takes state or a runtime besides its arguments, or that is not known."""

    name: str
    injected: bool = False


class ToolPolicy:
    """Who may run early: by default no tool.

    `read_only` are names of tools that change nothing and may run early; a tool that needs approval or takes injected
    state never may. `max_age` is the most seconds between the start of a tool and the call that its result is used
    for. Raises `ConfigurationError` for values that cannot be used.
    """

    def __init__(self, read_only: Collection[str] = (), *, max_age: float = DEFAULT_AGE) -> None:
        self.read_only = _names(read_only)
        self.max_age = _age(max_age)
        self._warned: set[str] = set()

    def changes_nothing(self, spec: ToolSpec | None) -> bool:
        """Whether a call of the tool leaves the results of others valid. An unknown tool, None, does not."""
        return spec is not None and spec.name in self.read_only

    def may_run_early(self, spec: ToolSpec | None) -> bool:
        """Whether the tool may be started on a prediction."""
        if spec is None or not self.changes_nothing(spec):
            return False
        if spec.injected and spec.name not in self._warned:
            self._warned.add(spec.name)
            why = "it needs approval, or may depend on more than its arguments"
            _log.warning("the tool %s is listed as read-only, but does not run early: %s", spec.name, why)
        return not spec.injected

    def offered(self, names: Collection[str]) -> None:
        """Warn once of each read-only tool that an agent lacks where one that is not listed has nearly its name.

        Others may belong to another agent with the same policy.
        """
        for name in self.read_only.difference(names) - self._warned:
            if near := difflib.get_close_matches(name, {*names} - self.read_only, n=1, cutoff=_NEAR):
                self._warned.add(name)
                _log.warning("no tool %s is offered, which is listed as read-only; did you mean %s?", name, near[0])


def _names(values: Collection[str]) -> frozenset[str]:
    listed = isinstance(values, Collection) and not isinstance(values, str)
    if not listed or not all(isinstance(name, str) for name in values):
        raise ConfigurationError(f"read_only must be a list of names, not {values!r}", param="read_only")
    return frozenset(values)


def _age(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigurationError(f"max_age must be seconds above 0, not {value!r}", param="max_age")
    return float(value)


@dataclass(frozen=True, slots=True)
class AgentCaller:
    """Who an agent works for. `identity` distinguishes the credentials with which its tools run, such as a user's id.

    Nothing is shared between tenants or identities. What is learned belongs to a tenant's `agent`. `branch` separates
    conversations of one session at the same time: what may change something in one voids what was read in all.
    """

    tenant: str = "default"
    agent: str = "agent"
    session: str = ""
    identity: str = ""
    branch: str = ""
