"""Recorded sessions as a live agent meets them: what it hears at each turn, says, and what its tools return."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentspec.benchmarks.agent_tools.replay import by_session, calls_of, text_of
from agentspec.recordings.calls import RecordedCall
from agentspec.tools.prediction.history import ToolCall
from agentspec.types import Message

SYSTEM_CHARACTERS = 2000
VOID = "a result from before a change"


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """What the agent heard since its last turn, what it then said, and the calls in that."""

    heard: tuple[Message, ...]
    answer: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True, eq=False)  # two may hold the same
class RecordedSession:
    """A session, with the recorded calls that it was made of."""

    name: str
    turns: tuple[RecordedTurn, ...]
    source: tuple[RecordedCall, ...]

    @property
    def waits(self) -> int:
        """How many turns wait for tools."""
        return sum(bool(turn.calls) for turn in self.turns)

    @property
    def characters(self) -> int:
        """The length of all answers."""
        return sum(len(turn.answer) for turn in self.turns)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(turns, characters of answers, turns that wait for tools)."""
        return len(self.turns), self.characters, self.waits


def sessions_of(recorded: Iterable[RecordedCall], most_turns: int) -> list[RecordedSession]:
    """The sessions in their order, each cut behind `most_turns` turns or before its history is reset."""
    return [_session(name, calls[:most_turns]) for name, calls in by_session(recorded)]


def _session(name: str, calls: Sequence[RecordedCall]) -> RecordedSession:
    turns: list[RecordedTurn] = []
    source: list[RecordedCall] = []
    seen = 0
    for call in calls:
        if len(call.messages) < seen:
            break
        messages = [_shortened(one) for one in call.messages]
        heard = tuple(one for one in messages[seen:] if one["role"] != "assistant")
        turns.append(RecordedTurn(heard, _spoken(call.answer), tuple(calls_of(call.answer))))
        source.append(replace(call, messages=messages))
        seen = len(messages)
    return RecordedSession(name, tuple(turns), tuple(source))


def _shortened(message: Message) -> Message:
    """A message as the small model reads it: a system prompt is cut."""
    text = _spoken(message)
    return {**message, "content": text[:SYSTEM_CHARACTERS] if message.get("role") == "system" else text}


def _spoken(message: Message) -> str:
    """The text of a message, each call in a line of JSON."""
    calls = [{"name": call.name, "arguments": call.arguments} for call in calls_of({**message, "content": None})]
    return "\n".join([text_of({**message, "tool_calls": None}), *map(json.dumps, calls)]).strip("\n")


class RecordedTools:
    """The tools of a session: each takes `seconds`, and returns what the recording has for its call from now on.

    A result that comes only after a change is not what the tool would return now: it returns `VOID` then, which no
    agent may see.
    """

    def __init__(self, session: RecordedSession, read_only: Collection[str], seconds: float) -> None:
        self._turns, self._read_only, self._seconds = session.turns, read_only, seconds
        self.turn = 0
        """The agent's turn, counted from 0."""

    async def run(self, call: ToolCall) -> str:
        result = self._result(call)
        await asyncio.sleep(self._seconds)
        return result

    def _result(self, call: ToolCall) -> str:
        for number in range(self.turn, len(self._turns)):
            for made, result in self._results(number):
                if made.identity == call.identity:
                    return result
            if any(made.name not in self._read_only for made in self._turns[number].calls):
                return VOID
        return "nothing"

    def _results(self, number: int) -> Iterator[tuple[ToolCall, str]]:
        """The calls of a turn with their results."""
        heard: Sequence[Any] = self._turns[number + 1].heard if number + 1 < len(self._turns) else ()
        texts = [str(one["content"]) for one in heard if one["role"] == "tool"]
        return zip(self._turns[number].calls, texts, strict=False)
