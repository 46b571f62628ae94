"""Shapes of recorded sessions (lengths, what they share, how long tools take), and the sessions simulated from them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from pathlib import PurePath

from agentspec.benchmarks.placement.scenario import EngineCosts
from agentspec.errors import ConfigurationError
from agentspec.placement import Call
from agentspec.recordings.calls import RecordedCall

CHARACTERS_PER_TOKEN = 4
SHARED_TOKENS = 64  # what sessions share is found in pieces of so many tokens
RECORDED_TOKEN_SECONDS = 0.02  # taken off recorded times between calls, for each token of the answer


Stretch = tuple[int, int]
"""A stretch of prompts that is shared or not as a whole: its key, and its tokens."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """One call. Tokens are of its session's own part; the shared part comes before.

    The first `keep` tokens are those of the call before and its answer. `pause` is what tools or the user took before
    it, in seconds; None if the recording does not say.
    """

    prompt: int
    keep: int
    answer: int
    pause: float | None = None
    step: str | None = None


@dataclass(frozen=True, slots=True)
class SessionShape:
    """A recorded session: what it shares with others, then its calls."""

    workflow: str
    shared: tuple[Stretch, ...]
    calls: tuple[CallShape, ...]
    shared_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_tokens", sum(tokens for _, tokens in self.shared))

    @property
    def longest(self) -> int:
        """Most tokens that a call holds."""
        return self.shared_tokens + max(call.prompt + call.answer for call in self.calls)


class SimulatedSession:
    """The state of a session and of the one call that it has under way. Times are simulated seconds."""

    __slots__ = (
        "answer",
        "arrived",
        "blocks",
        "deadline",
        "hit",
        "keep",
        "member",
        "name",
        "number",
        "own",
        "pauses",
        "position",
        "sent",
        "shape",
        "started",
        "tokens",
        "waited",
        "work",
    )

    def __init__(self, number: int, shape: SessionShape, arrived: float, pauses: Sequence[float]) -> None:
        self.number, self.shape, self.arrived, self.pauses = number, shape, arrived, pauses
        self.name = f"s{number}"
        self.deadline = inf
        self.position = 0
        self.blocks: list[int] = []
        self.own = -1 - number  # its stretch in the engines' caches; shared ones are not negative
        self.keep = self.answer = self.tokens = 0
        self.member = ""  # where its latest call was sent
        self.hit = self.work = 0
        self.sent = self.started = 0.0
        self.waited = 0.0  # by all its calls so far, before an engine began with them

    @property
    def call(self) -> CallShape:
        return self.shape.calls[self.position]

    def alone(self, costs: EngineCosts) -> float:
        """Seconds from arrival to the last answer on an idle engine that keeps all."""
        shared, calls = self.shape.shared_tokens, self.shape.calls
        read = [calls[0].prompt + shared, *(call.prompt - call.keep for call in calls[1:])]
        return sum(costs.alone(new, call.answer) for new, call in zip(read, calls, strict=True)) + sum(self.pauses)

    def begin(self, now: float, block_tokens: int, shared_blocks: Sequence[int]) -> None:
        """Make the call at `position`: `tokens` of its own stretch are held, `blocks` are what the gateway sees."""
        call = self.call
        self.keep, self.answer, self.tokens = call.keep, call.answer, call.prompt + call.answer
        self.sent = now
        self.blocks = self.blocks or list(shared_blocks)
        shared = self.shape.shared_tokens
        del self.blocks[max((shared + call.keep) // block_tokens, len(shared_blocks)) :]
        base = ((self.number << 12) + self.position) << 20
        missing = range(len(self.blocks), (shared + call.prompt) // block_tokens)
        self.blocks.extend([base + place for place in missing])

    def placement(self) -> Call:
        """What the gateway knows of the call."""
        return Call(self.name, self.blocks)


@dataclass(slots=True)
class _Recorded:
    workflow: str
    calls: list[CallShape] = field(default_factory=list)
    first: str = ""
    before: str = ""
    at: float | None = None


def shapes(recorded: Mapping[str, Iterable[RecordedCall]]) -> list[SessionShape]:
    """The shapes of the sessions in files, by path of the file, whose name is the workflow of calls without one.

    A text counts a token for every four characters. Raises `ConfigurationError` if there is no call.
    """
    sessions: dict[tuple[str, str], _Recorded] = {}
    for path, calls in recorded.items():
        for call in calls:
            workflow = call.labels.workflow or PurePath(path).name
            session = sessions.setdefault((path, call.labels.session or call.place), _Recorded(workflow))
            _add(session, call)
    if not sessions:
        raise ConfigurationError("the recordings hold no calls")
    shared = _shared_stretches([session.first for session in sessions.values()])
    return [_shape(session, common) for session, common in zip(sessions.values(), shared, strict=True)]


def _add(session: _Recorded, call: RecordedCall) -> None:
    text, answer = _prompt(call), _rendered(call.answer)
    tokens, keep, pause = max(1, _tokens(len(answer))), _common(session.before, text), None
    if call.created_at is not None and session.at is not None:
        pause = max(0.0, call.created_at - session.at - RECORDED_TOKEN_SECONDS * tokens)
    session.calls.append(CallShape(_tokens(len(text)), _tokens(keep), tokens, pause, call.labels.step))
    session.first = session.first or text
    session.before = text + answer
    session.at = call.created_at


def _shape(session: _Recorded, shared: tuple[Stretch, ...]) -> SessionShape:
    """The session with the shared part, which all its calls are taken to begin with, taken off them."""
    common = sum(tokens for _, tokens in shared)
    calls = [
        replace(call, prompt=max(1, call.prompt - common), keep=max(0, min(call.keep, call.prompt) - common))
        for call in session.calls
    ]
    return SessionShape(session.workflow, shared, tuple(calls))


def _shared_stretches(prompts: Sequence[str]) -> Iterator[tuple[Stretch, ...]]:
    """For each prompt what other prompts begin with too, in stretches that always come together."""
    size = SHARED_TOKENS * CHARACTERS_PER_TOKEN
    hashes = [[hash(text[:end]) for end in range(size, len(text) + 1, size)] for text in prompts]
    users = Counter(one for each in hashes for one in each)
    for each in hashes:
        common = [one for one in each if users[one] > 1]
        groups = [list(group) for _, group in groupby(common, key=users.__getitem__)]
        yield tuple((group[-1], SHARED_TOKENS * len(group)) for group in groups)


def _prompt(call: RecordedCall) -> str:
    return call.prompt if call.prompt is not None else "".join(map(_rendered, call.messages))


def _rendered(message: Mapping[str, object]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, default=str)
    calls = message.get("tool_calls")
    return f"\n<{message.get('role')}>{text}{json.dumps(calls, default=str) if calls else ''}"


def _common(one: str, other: str) -> int:
    """Characters of the longest common prefix."""
    longest = min(len(one), len(other))
    return bisect_left(range(1, longest + 1), True, key=lambda end: one[:end] != other[:end])


def _tokens(characters: int) -> int:
    return characters // CHARACTERS_PER_TOKEN
