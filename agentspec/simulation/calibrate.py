"""What a server's steps cost, by timing the answers of one that is otherwise idle."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentspec.errors import ConfigurationError
from agentspec.simulation.costs import EngineCosts
from agentspec.types import Delta, GenerateRequest, SamplingParams

Generate = Callable[[GenerateRequest], AsyncIterator[Delta]]
Progress = Callable[[str], None]

_NAMES = ("step", "sequence", "context_token", "prompt_token")
_SHORT = 32  # words of a prompt whose context costs next to nothing
_FIRST_STREAMS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Some steps that took `seconds` together: how many, and in each the sequences that decoded, and their context.

    `prompt` are the tokens of prompts that they read in all.
    """

    seconds: float
    steps: float
    sequences: float
    context: float
    prompt: float


@dataclass(frozen=True, slots=True)
class _TimedAnswer:
    sent: float
    tokens: list[float]  # when each came
    prompt: int


def fit(times: Sequence[StepTimes], base: EngineCosts) -> EngineCosts:
    """`base` with the costs that explain `times` best, by least squares of relative errors; none is below zero.

    Raises `ConfigurationError` if there are none, or no cost of a step, or of a prompt's token, comes out of them.
    """
    if not times:
        raise ConfigurationError("no answer could be timed: the server has to stream several tokens, and tell usage")
    rows = np.array([(one.steps, one.steps * one.sequences, one.steps * one.context, one.prompt) for one in times])
    seconds = np.array([one.seconds for one in times])
    used, costs = list(range(len(_NAMES))), np.zeros(len(_NAMES))
    while used:
        found = np.linalg.lstsq(rows[:, used] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
        if min(found) >= 0:
            costs[used] = found
            break
        used.pop(int(np.argmin(found * rows[:, used].mean(axis=0))))
    if not (costs[0] > 0 and costs[3] > 0):
        raise ConfigurationError(
            "the times do not fit an engine's steps: is the server busy, or are prompts too short?"
        )
    return base.model_copy(update=dict(zip(_NAMES, map(float, costs), strict=True)))


async def measure(
    generate: Generate,
    model: str,
    base: EngineCosts,
    *,
    words: int = 1024,
    answer: int = 48,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = lambda _: None,
) -> list[StepTimes]:
    """Time prompts of up to `words` words that the server cannot know, and `answer` tokens written beside others.

    The server's own speculation is asked to be off. Raises what `generate` raises.
    """
    texts = random.Random()  # other words in every run, or the server would have the prompts cached
    times: list[StepTimes] = []

    async def ask(length: int, tokens: int) -> _TimedAnswer:
        prompt = "Count from one to one thousand. " + " ".join(str(texts.randrange(100, 1000)) for _ in range(length))
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        request = GenerateRequest(model, [{"role": "user", "content": prompt}], sampling=sampling, speculation=False)
        sent, came, usage = clock(), [], 0
        async for delta in generate(request):
            came += [clock()] * (bool(delta.text) or len(delta.token_ids) > 0)
            usage = delta.usage.prompt_tokens if delta.usage else usage
        return _TimedAnswer(sent, came, usage)

    await ask(_SHORT, 2)  # connections, and what servers do only once
    for _ in range(rounds):
        for length in (words // 8, words // 4, words // 2, words):
            progress(f"reading {length} words")
            times += _reading(await ask(length, 1), base.max_batched_tokens)
        for streams in _FIRST_STREAMS:
            for length in (_SHORT, words):
                progress(f"{streams} streams after {length} words")
                answers = await asyncio.gather(*(ask(length, answer) for _ in range(streams)))
                times += _decoding(answers)
    return times


def _reading(answer: _TimedAnswer, batch: int) -> list[StepTimes]:
    if not (answer.tokens and answer.prompt):
        return []
    return [StepTimes(answer.tokens[0] - answer.sent, -(-answer.prompt // batch), 0.0, 0.0, answer.prompt)]


def _decoding(answers: Sequence[_TimedAnswer]) -> list[StepTimes]:
    """The steps in which all answers were written, from the last one's first token to the first one's last."""
    if not all(answer.tokens for answer in answers):
        return []
    begin, end = max(answer.tokens[0] for answer in answers), min(answer.tokens[-1] for answer in answers)
    counts = [sum(begin < at <= end for at in answer.tokens) for answer in answers]
    steps = sum(counts) / len(counts)
    if end <= begin or steps < 2:
        return []
    context = sum(answer.prompt + len(answer.tokens) / 2 for answer in answers)
    return [StepTimes(end - begin, steps, len(answers), context, 0.0)]
