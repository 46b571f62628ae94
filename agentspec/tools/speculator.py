"""Runs tools before the model asks for them, and uses a result only for the identical call."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

from agentspec.cache.stored import StoredTurn, new_turn
from agentspec.errors import CacheError
from agentspec.tools.history import ToolCall, ToolHistory
from agentspec.tools.model import (
    AT_ONCE,
    CallForecast,
    CallModel,
    CallPrediction,
    LaterScore,
    TurnObservation,
    worthwhile,
)
from agentspec.tools.policy import AgentCaller, ToolPolicy
from agentspec.tools.session import ToolSession
from agentspec.tools.speculative_call import ToolEvent, contained

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache
    from agentspec.cache.side_stores import State, ToolTurnStore

_log = logging.getLogger("agentspec.tools")

_MOST_SESSIONS = 1024
_MOST_AGENTS = 64  # in memory
_REFRESH = 1.0  # seconds


class ToolSpeculator:
    """Predicts tool calls, starts those that may run early and pay, and hands over what the model then calls.

    `policy` says which tools may run early, by default none. What is learned is stored in the database of `cache`, and
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

    def report(self, event: ToolEvent) -> None:
        """Log an event (logger `agentspec.tools`, level DEBUG), and pass it to `on_event`, which may fail."""
        _log.debug("%s tool=%s tenant=%s agent=%s session=%s seconds=%.3f", *astuple(event))
        with contained("on_event"):
            self._on_event(event)


def _in_memory() -> State:
    from agentspec.cache.side_stores import State
    from agentspec.cache.stored import StoreLimits

    return State(None, StoreLimits())


class _Agent:
    """One agent's model, and the ids of the stored turns that it was made of."""

    def __init__(self) -> None:
        self.model = CallModel()
        self.ids: set[str] = set()
        self.generation = -1
        self.refresh_at = 0.0
        self.reading = threading.Lock()  # one thread at a time reads what is stored
        self.seconds: list[tuple[str, float]] = []  # (tool, seconds) measured since the last turn that was learned


class LearnedCalls:
    """The models of all agents. Thread-safe. Tenants share nothing."""

    def __init__(self, store: ToolTurnStore) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._agents: OrderedDict[tuple[str, str], _Agent] = OrderedDict()

    def refresh(self, caller: AgentCaller) -> None:
        """Take in what other processes learned, and drop what was forgotten. Blocks while the database is read."""
        with self._lock:
            agent = self._agent(caller)
        with agent.reading:  # not the other lock, for which event loops wait
            generation = self._store.generation
            if generation == agent.generation and time.monotonic() < agent.refresh_at:
                return
            try:
                self._follow(agent, caller)
            except CacheError as error:
                _log.warning("what was learned about tools cannot be read: %s", error)
            agent.generation, agent.refresh_at = generation, time.monotonic() + _REFRESH

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
        """Learn a turn, and store it."""
        with self._lock:
            agent = self._agent(caller)
            seconds, agent.seconds = agent.seconds, []
            observation = agent.model.observe(history, calls, forecast, tools, seconds, later)
            turn = new_turn(caller.tenant, caller.agent, caller.session, observation.to_json())
            if self._store.put(turn):
                agent.model.learn(observation, caller.session)
                agent.ids.add(turn.id)

    def _agent(self, caller: AgentCaller) -> _Agent:
        key = caller.tenant, caller.agent
        agent = self._agents.setdefault(key, _Agent())
        self._agents.move_to_end(key)
        while len(self._agents) > _MOST_AGENTS:
            self._agents.popitem(last=False)
        return agent

    def _follow(self, agent: _Agent, caller: AgentCaller) -> None:
        with self._lock:
            learned = set(agent.ids)
        stored = self._store.ids(caller.tenant, caller.agent)
        if learned.difference(stored):  # some were forgotten
            with self._lock:
                agent.model, agent.ids, learned = CallModel(), set(), set()
        fresh = [id for id in stored if id not in learned]
        for turn in self._store.read(caller.tenant, caller.agent, fresh) if fresh else ():
            with self._lock:  # for one turn at a time: event loops wait for it
                if turn.id not in agent.ids:
                    agent.ids.add(turn.id)
                    _learn(agent.model, turn)
        with self._lock:
            agent.ids.update(fresh)


def _learn(model: CallModel, turn: StoredTurn) -> None:
    try:
        model.learn(TurnObservation.from_json(turn.body), turn.session)
    except Exception as error:  # whatever a damaged turn holds
        _log.warning("what was learned from a turn is left out: %s", error)
