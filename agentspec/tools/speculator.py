"""Runs tools before the model asks for them, and uses a result only for the identical call."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple

from agentspec.tools.history import ToolCall, ToolHistory
from agentspec.tools.model import AT_ONCE, CallForecast, CallModel, CallPrediction, Outlook, worthwhile
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
        self._lock = threading.Lock()
        self._sessions: OrderedDict[AgentCaller, ToolSession] = OrderedDict()
        self._learning = threading.Lock()
        self._models: OrderedDict[tuple[str, str], CallModel] = OrderedDict()  # by tenant and agent

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
        with self._learning:
            for key in [key for key in self._models if key[0] == tenant]:
                del self._models[key]

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

    def forecast(
        self, caller: AgentCaller, history: ToolHistory, tools: Collection[str]
    ) -> tuple[CallForecast, list[CallPrediction]]:
        """What the next turn may call, and which of these calls are worth an early start."""
        with self._learning:
            model = self._model(caller)
            forecast = model.predict(history, tools)
            return forecast, worthwhile(forecast.predictions, model.seconds)

    def took(self, caller: AgentCaller, tool: str, seconds: float) -> None:
        """Learn how long a tool, or a turn of the model, took."""
        with self._learning:
            self._model(caller).took(tool, seconds)

    def learn(
        self,
        caller: AgentCaller,
        history: ToolHistory,
        calls: Sequence[ToolCall],
        forecast: CallForecast,
        tools: Collection[str],
        later: Sequence[Outlook],
    ) -> None:
        """Learn a turn."""
        with self._learning:
            self._model(caller).learn(history, calls, forecast, tools, caller.session, later)

    def _model(self, caller: AgentCaller) -> CallModel:
        key = caller.tenant, caller.agent
        model = self._models.setdefault(key, CallModel())
        self._models.move_to_end(key)
        while len(self._models) > _MOST_AGENTS:
            self._models.popitem(last=False)
        return model
