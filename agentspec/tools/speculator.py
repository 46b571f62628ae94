"""Runs tools before the model asks for them, and uses a result only for the identical call."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple

from agentspec.tools.history import ToolCall, ToolHistory
from agentspec.tools.model import AT_ONCE, CallForecast, CallModel, CallPrediction, LaterScore, worthwhile
from agentspec.tools.policy import AgentCaller, ToolPolicy
from agentspec.tools.session import ToolSession
from agentspec.tools.speculative_call import ToolEvent, contained

_log = logging.getLogger("agentspec.tools")

_MOST_SESSIONS = 1024
_MOST_AGENTS = 64  # in memory


class ToolSpeculator:
    """Predicts tool calls, starts those that may run early and pay, and hands over what the model then calls.

    `policy` says which tools may run early, by default none. What is learned stays in memory. `on_event` is called for
    every start and its end.
    """

    def __init__(
        self,
        policy: ToolPolicy | None = None,
        *,
        on_event: Callable[[ToolEvent], object] = lambda _: None,
    ) -> None:
        self.policy = policy or ToolPolicy()
        self.free = threading.Semaphore(AT_ONCE)  # starts that may run besides those that do
        self._on_event = on_event
        self.learned = LearnedCalls()
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

    def forget(self, tenant: str) -> None:
        """Drop what the agents of a tenant taught."""
        self.learned.forget(tenant)

    def close(self) -> None:
        """Drop what was started and is not used."""
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), OrderedDict()
        for session in sessions:
            session.close()

    def report(self, event: ToolEvent) -> None:
        """Log an event (logger `agentspec.tools`, level DEBUG), and pass it to `on_event`, which may fail."""
        _log.debug("%s tool=%s tenant=%s agent=%s session=%s seconds=%.3f", *astuple(event))
        with contained("on_event"):
            self._on_event(event)


class _Agent:
    """One agent's model."""

    def __init__(self) -> None:
        self.model = CallModel()
        self.seconds: list[tuple[str, float]] = []  # (tool, seconds) measured since the last turn that was learned


class LearnedCalls:
    """The models of all agents. Thread-safe. Tenants share nothing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._agents: OrderedDict[tuple[str, str], _Agent] = OrderedDict()

    def forget(self, tenant: str) -> None:
        with self._lock:
            for key in [key for key in self._agents if key[0] == tenant]:
                del self._agents[key]

    def forecast(
        self, caller: AgentCaller, history: ToolHistory, tools: Collection[str]
    ) -> tuple[CallForecast, list[CallPrediction]]:
        """What the next turn may call, and which of these calls are worth an early start."""
        with self._lock:
            model = self._agent(caller).model
            forecast = model.predict(history, tools)
            return forecast, worthwhile(forecast.predictions, model.seconds)

    def took(self, caller: AgentCaller, tool: str, seconds: float) -> None:
        """A tool, or a turn of the model, took so long. It counts from the next turn on that is learned."""
        with self._lock:
            agent = self._agent(caller)
            agent.seconds = [*agent.seconds[-63:], (tool, seconds)]

    def add(
        self,
        caller: AgentCaller,
        history: ToolHistory,
        calls: Sequence[ToolCall],
        forecast: CallForecast,
        tools: Collection[str],
        later: Sequence[LaterScore] = (),
    ) -> None:
        """Learn a turn."""
        with self._lock:
            agent = self._agent(caller)
            seconds, agent.seconds = agent.seconds, []
            agent.model.learn(history, calls, forecast, tools, caller.session, seconds, later)

    def _agent(self, caller: AgentCaller) -> _Agent:
        key = caller.tenant, caller.agent
        agent = self._agents.setdefault(key, _Agent())
        self._agents.move_to_end(key)
        while len(self._agents) > _MOST_AGENTS:
            self._agents.popitem(last=False)
        return agent
