"""Lets a speculator learn a recorded session that is not run, by the computed clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentspec.benchmarks.agent_tools.recorded import RecordedSession
from agentspec.benchmarks.agent_tools.replay import Matching, SessionPlayer, text_of
from agentspec.tools.keys import AgentCaller
from agentspec.tools.learned import LearnedCalls
from agentspec.tools.prediction.history import ToolCall, ToolHistory
from agentspec.tools.prediction.model import TURN, CallForecast
from agentspec.tools.prediction.observation import LaterScore

TOKENS = 2  # of an answer that a step writes with drafts, about


@dataclass(frozen=True, slots=True)
class LearningTimes:
    """The seconds that each tool and each turn of the model took."""

    tool: float
    turn: float


@dataclass(frozen=True, slots=True)
class SpeculatorLearner:
    """Passes the turns of a session on to what a speculator has learned."""

    learned: LearnedCalls
    caller: AgentCaller
    times: LearningTimes

    def predict(self, history: ToolHistory, tools: Collection[str]) -> CallForecast:
        return self.learned.forecast(self.caller, history, tools)[0]

    def learn(
        self,
        history: ToolHistory,
        calls: Sequence[ToolCall],
        forecast: CallForecast,
        tools: Collection[str],
        later: Sequence[LaterScore],
    ) -> None:
        self.learned.took(self.caller, TURN, self.times.turn)
        for call in calls:
            self.learned.took(self.caller, call.name, self.times.tool)
        self.learned.add(self.caller, history, calls, forecast, tools, later)


def learn_session(
    session: RecordedSession, learned: LearnedCalls, caller: AgentCaller, tools: Matching, times: LearningTimes
) -> None:
    """Learn all turns of a session, in their order."""
    player = SessionPlayer(SpeculatorLearner(learned, caller, times), tools, times.tool)
    for recorded in session.source:
        text = text_of(recorded.answer)
        player.turn(recorded, len(text) / 4, 1 / TOKENS, ())
