"""Shapes of recorded sessions: how long each prompt and answer is, what it shares, and how long tools take."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import PurePath

from agentspec.benchmarks.placement.prefix_cache import Stretch
from agentspec.errors import ConfigurationError
from agentspec.recordings.calls import RecordedCall

CHARACTERS_PER_TOKEN = 4
SHARED_TOKENS = 64  # what sessions share is found in pieces of so many tokens
RECORDED_TOKEN_SECONDS = 0.02  # taken off recorded times between calls, for each token of the answer


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


def single_calls(sessions: Sequence[SessionShape]) -> list[SessionShape]:
    """Every call by itself, as a session of its own that shares nothing."""
    return [
        SessionShape("", (), (replace(call, prompt=session.shared_tokens + call.prompt, keep=0),))
        for session in sessions
        for call in session.calls
    ]


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
