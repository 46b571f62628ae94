"""Recorded calls as token arrays, and their teacher-forced replay: drafts step by step, compared with what was written.

A step is one verification: the target accepts the path of the draft that agrees with the recorded text and adds one
token of its own. Tokens per step is thus the speed-up that verification alone allows, if everything else were free.

A line of a trace is one call: `{"session", "messages_delta": [{"role", "content"}], "response"}`. The delta holds the
messages added since the session's previous call, except that call's answer; `"reset": true` starts from an empty
history. Prompts are rendered as `<|im_start|>role\\ncontent<|im_end|>\\n` and end with `<|im_start|>assistant\\n`; a
response ends with `<|im_end|>`, which the model writes too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.protocol.validation import NOT_TEXT, is_text
from agentspec.recordings.calls import BadLineError, RecordedCall
from agentspec.recordings.formats import Format, read
from agentspec.types import Draft, Message

START, END = "<|im_start|>", "<|im_end|>"

Encode = Callable[[str], Sequence[int]]
"""Encodes a text as token ids and adds no special tokens."""


@dataclass(frozen=True, slots=True)
class EncodedCall:
    """One recorded call: the tokens of the prompt, and of the response with its end of turn."""

    session: str
    prompt: Tokens
    response: Tokens


def load_encoder(folder: Path) -> Encode:
    """An encoder from the `tokenizer.json` of a Hugging Face folder. Raises `ConfigurationError` if it is missing.

    The encoder raises `InvalidRequestError` for half a surrogate pair.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(f"there is no tokenizer.json in {str(folder)!r}")
    tokenizer = Tokenizer.from_file(str(file))

    def encode(text: str) -> Sequence[int]:
        if not is_text(text):
            raise InvalidRequestError(f"the text{NOT_TEXT}")
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


def read_calls(path: Path, encode: Encode, limit: int | None = None) -> list[EncodedCall]:
    """The first `limit` calls of a trace. Raises `ConfigurationError` for a bad line, and what `chatml` raises."""
    return list(map(chatml(encode), islice(read(path, Format.trace), limit)))


def chatml(encode: Encode) -> Callable[[RecordedCall], EncodedCall]:
    """A function that turns recorded calls into token arrays, for models with a ChatML template.

    It encodes each distinct message once. The result equals the encoding of the whole prompt, because the tokenizer
    splits at its special tokens first. Raises `ConfigurationError` if `<|im_start|>` or `<|im_end|>` is not a single
    token, and for messages that are not text.
    """
    for mark in (START, END):
        if len(encode(mark)) != 1:
            raise ConfigurationError(f"the tokenizer has no special token {mark}; use one with a ChatML template")

    @cache
    def tokens(text: str) -> Tokens:
        return np.asarray(encode(text), dtype=np.int32)

    generation = tokens(f"{START}assistant\n")

    def call(recorded: RecordedCall) -> EncodedCall:
        if recorded.prompt is not None:
            prompt = tokens(recorded.prompt)
        else:
            rendered = (_rendered(message, recorded) for message in recorded.messages)
            prompt = np.concatenate([*(tokens(text) for text in rendered), generation])
        end = END if recorded.finished else ""
        answer = tokens(_text(recorded.answer, recorded) + end)
        if not len(answer):
            raise BadLineError(recorded.place, "the answer holds no tokens")
        return EncodedCall(recorded.labels.session or "", prompt, answer)

    return call


def _rendered(message: Message, recorded: RecordedCall) -> str:
    return f"{START}{message['role']}\n{_text(message, recorded)}{END}\n"


def _text(message: Message, recorded: RecordedCall) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise BadLineError(
            recorded.place, "a message is not text; replay with --model reads it by the model's template"
        )
    return content


class OpenRequest(Protocol):
    """One generation in progress, such as a `CacheRequest`."""

    def draft(self, max_tokens: int) -> Draft: ...
    def extend(self, tokens: Tokens) -> None: ...


_POINTS = 10  # at most so many windows of calls of a log
Open = Callable[[EncodedCall], AbstractContextManager[OpenRequest]]


@dataclass(slots=True)
class Replay:
    """The counts of one pass over the calls of a file. Row i of `tokens`, `steps` and `drafted` is call i."""

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    predicted: list[NDArray[np.float32]] = field(default_factory=list)  # of each step's nodes
    accepted: list[NDArray[np.bool_]] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)  # of each step
    extend_seconds: float = 0.0  # of all calls, like the fields below
    open_seconds: float = 0.0
    close_seconds: float = 0.0
    prompt_tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        return sum(self.tokens) / sum(self.steps)

    @property
    def drafted_per_step(self) -> float:
        return sum(self.drafted) / sum(self.steps)

    def tokens_per_step_by_call(self, window: int) -> list[float]:
        """Tokens per step of calls 0 to window - 1, of the next `window` calls, and so on."""
        starts = range(0, len(self.tokens), window)
        return [sum(self.tokens[i : i + window]) / sum(self.steps[i : i + window]) for i in starts]

    def hit_rate_by_call(self, window: int) -> list[float]:
        """Share of steps with at least one accepted token, for the same groups of calls."""
        hits = np.fromiter((bool(nodes.any()) for nodes in self.accepted), dtype=np.float64, count=len(self.accepted))
        ends = np.cumsum(self.steps)
        starts = range(0, len(self.steps), window)
        return [float(hits[(ends[i - 1] if i else 0) : ends[i : i + window][-1]].mean()) for i in starts]

    def calibration(self, bins: int = 10) -> list[tuple[float, float]]:
        """(mean predicted, measured) acceptance of drafted nodes, in bins of equal size, sorted by prediction."""
        predicted = np.concatenate(self.predicted)
        accepted = np.concatenate(self.accepted)
        groups = np.array_split(np.argsort(predicted, kind="stable"), bins)
        return [(float(predicted[group].mean()), float(accepted[group].mean())) for group in groups if len(group)]

    def worst_calibration(self) -> float:
        """Largest distance between predicted and measured acceptance over the bins."""
        return max((abs(predicted - measured) for predicted, measured in self.calibration()), default=0.0)


def replay(calls: Sequence[EncodedCall], open_request: Open, budget: int) -> Replay:
    """Replay `calls` in order with draft trees of at most `budget` tokens."""
    result = Replay()
    for call in calls:
        start = time.perf_counter()
        with open_request(call) as request:
            result.open_seconds += time.perf_counter() - start
            result.prompt_tokens += len(call.prompt)
            _replay_call(call.response, request, budget, result)
            start = time.perf_counter()
        result.close_seconds += time.perf_counter() - start
    return result


def replay_cache(calls: Sequence[EncodedCall], budget: int) -> Replay:
    """Replay `calls` with their sessions over one in-memory cache, which is empty at the start."""
    with SuffixCache.open() as cache:
        return replay(calls, lambda call: cache.request(call.prompt, session=call.session), budget)


def _replay_call(response: Tokens, request: OpenRequest, budget: int, result: Replay) -> None:
    at = steps = drafted = 0
    while at < len(response):
        start = time.perf_counter()
        draft = request.draft(budget)
        drawn = time.perf_counter()
        accepted = accepted_nodes(draft, response[at:])
        committed = response[at : at + int(accepted.sum()) + 1]
        begun = time.perf_counter()
        request.extend(committed)
        result.extend_seconds += time.perf_counter() - begun
        result.draft_seconds.append(drawn - start)
        result.predicted.append(draft.probabilities)
        result.accepted.append(accepted)
        at, steps, drafted = at + len(committed), steps + 1, drafted + len(draft.tokens)
    result.tokens.append(at)
    result.steps.append(steps)
    result.drafted.append(drafted)


def accepted_nodes(draft: Draft, actual: Tokens) -> NDArray[np.bool_]:
    """Whether each node lies on the path that spells the beginning of `actual`: at most one node per depth."""
    accepted = np.zeros(len(draft.tokens), dtype=np.bool_)
    expected = actual[: len(draft.tokens)].tolist()
    node, depth = -1, 0
    for index, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        if depth < len(expected) and parent == node and token == expected[depth]:
            accepted[index] = True
            node, depth = index, depth + 1
    return accepted


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


@dataclass(frozen=True, slots=True)
class Savings:
    """Savings over a whole log; row i of the two `_over_time` fields covers calls `window * i` to `window * (i + 1)`.

    A step is one verification, which yields the accepted tokens and one more; without drafts each token takes a step.
    """

    calls: int
    tokens: int
    steps: int
    tokens_per_step: float
    drafted_per_step: float
    hit_rate: float  # share of steps with at least one accepted token
    saved: float  # share of the model's steps that would not have been taken
    window: int
    tokens_per_step_over_time: Sequence[float]
    hit_rate_over_time: Sequence[float]


def measure(replay: Replay) -> Savings:
    """The savings of a replay of at least one call."""
    calls, tokens, steps = len(replay.tokens), sum(replay.tokens), sum(replay.steps)
    window = -(-calls // _POINTS)
    return Savings(
        calls,
        tokens,
        steps,
        replay.tokens_per_step,
        replay.drafted_per_step,
        replay.hit_rate_by_call(calls)[0],
        1 - steps / tokens,
        window,
        replay.tokens_per_step_by_call(window),
        replay.hit_rate_by_call(window),
    )


def print_savings(savings: Savings, console: Console | None = None) -> None:
    table = Table(title="Over the calls seen", title_justify="left")
    for column in ("calls", "tokens per step", "steps with a hit"):
        table.add_column(column, justify="right")
    course = zip(savings.tokens_per_step_over_time, savings.hit_rate_over_time, strict=True)
    for number, (rate, hits) in enumerate(course):
        last = min(savings.calls, (number + 1) * savings.window)
        table.add_row(f"{number * savings.window + 1}-{last}", f"{rate:.2f}", f"{hits:.0%}")
    table.add_section()
    table.add_row("all", f"{savings.tokens_per_step:.2f}", f"{savings.hit_rate:.0%}")
    shown = console or Console()
    shown.print(table)
    shown.print(
        f"{savings.tokens} tokens in {savings.steps} steps of the model: {savings.saved:.0%} of its steps saved,"
        f" with {savings.drafted_per_step:.1f} tokens drafted a step.",
        highlight=False,
        soft_wrap=True,
    )
