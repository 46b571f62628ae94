"""Runs tools before the model asks for them, and uses a result only for the identical call."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING

from agentspec.tools.faults import kept_from_agent
from agentspec.tools.keys import AgentCaller
from agentspec.tools.learned import LearnedCalls
from agentspec.tools.policy import ToolPolicy
from agentspec.tools.session import ToolSession
from agentspec.tools.speculative_call import ToolEvent
from agentspec.tools.starts import AT_ONCE

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache
    from agentspec.cache.state import State

_log = logging.getLogger("agentspec.tools")

_MOST_SESSIONS = 1024


class ToolSpeculator:
    """Predicts tool calls, starts those that may run early and pay, and hands over what the model then calls.

    `policy` says which tools may run early, by default none. What is learned is kept in the database of `cache`, and
    in memory without one. `on_event` is called for every start and its end.
    """

    def __init__(
        self,
        policy: ToolPolicy | None = None,
        *,
        cache: SuffixCache | None = None,
        on_event: Callable[[ToolEvent], object] = lambda _: None,
    ) -> None:
        self.policy = policy or ToolPolicy()
        self.free = threading.Semaphore(AT_ONCE)  # starts that may run besides those that do
        self._on_event = on_event
        self.learned = LearnedCalls((cache or _in_memory()).tool_turns)
        self._lock = threading.Lock()
        self._sessions: OrderedDict[AgentCaller, ToolSession] = OrderedDict()

    def session(self, caller: AgentCaller) -> ToolSession:
        """The session of a caller, the same while it is in use. Of more than 1024 the one used longest ago goes.

        Results that are too old by now are dropped, in all sessions.
        """
        with self._lock:
            session = self._sessions.get(caller)
            if session is None:
                session = self._sessions[caller] = ToolSession(self, caller)
            self._sessions.move_to_end(caller)
            oldest = self._sessions.popitem(last=False)[1] if len(self._sessions) > _MOST_SESSIONS else None
            others = list(self._sessions.values())
        if oldest is not None:
            oldest.close()
        for one in others:
            one.drop_old()
        return session

    def close(self) -> None:
        """Drop what was started and is not used."""
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), OrderedDict()
        for session in sessions:
            session.close()

    def tell(self, event: ToolEvent) -> None:
        """Log an event (logger `agentspec.tools`, level DEBUG), and pass it to `on_event`, which may fail."""
        _log.debug("%s tool=%s tenant=%s agent=%s session=%s seconds=%.3f", *astuple(event))
        with kept_from_agent("on_event"):
            self._on_event(event)


def _in_memory() -> State:
    from agentspec.cache.responses import ResponseLimits
    from agentspec.cache.state import State

    return State(None, ResponseLimits())
