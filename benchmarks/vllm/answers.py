"""Compares greedy answers of engines with those of the engine without drafts, on texts with recurring passages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentspec.benchmarks.vllm.engine import EngineAnswer, EngineProcess
from agentspec.benchmarks.vllm.report import AnswerTurn
from agentspec.benchmarks.vllm.shapes import WORDS

PROMPTS, ALONE = 16, 4
TOKENS = 128
REPEATED = 20  # first tokens of a prompt that its second turn ends with
SPREAD, FOLLOW = 0.03, 0.05  # of the weights: answers are varied and repeat themselves
FIRST, AGAIN, BY_ONE, SECOND = "first time", "again", "one at a time", "second turn"

Prompts = Sequence[Sequence[int]]


def prompts() -> list[list[int]]:
    """Prompts that repeat a passage and begin it a third time; they differ in its length."""
    rng, made = np.random.default_rng(0), []
    for number in range(PROMPTS):
        passage, other = (rng.integers(10, WORDS, count).tolist() for count in (12 + number, 8))
        made.append([*passage, *other, *passage, *other[:4], *passage[: 5 + number % 6]])
    return made


class GreedyComparison:
    """The engine without drafts is asked first: its answers are to be equalled, and second turns go on from them."""

    def __init__(self, seconds: float) -> None:
        """`seconds` bound the wait for any answer."""
        self._seconds = seconds
        self._plain: dict[str, list[list[int]]] = {}

    def run(self, engine: EngineProcess) -> dict[str, AnswerTurn]:
        """Ask one engine all turns. Raises `EngineFailedError`."""
        engine.call("bench_draw_weights", SPREAD, FOLLOW, seconds=self._seconds)
        first = prompts()
        return {
            FIRST: self._compared(FIRST, [self._ask(engine, first)]),
            AGAIN: self._compared(AGAIN, [self._ask(engine, first)]),
            BY_ONE: self._compared(BY_ONE, [self._ask(engine, [prompt]) for prompt in first[:ALONE]]),
            SECOND: self._compared(SECOND, [self._ask(engine, self._second(first))]),
        }

    def _ask(self, engine: EngineProcess, asked: Prompts) -> EngineAnswer:
        return engine.generate(asked, TOKENS, seconds=self._seconds)

    def _second(self, first: list[list[int]]) -> list[list[int]]:
        said = self._plain[FIRST]
        return [[*prompt, *answer, *prompt[:REPEATED]] for prompt, answer in zip(first, said, strict=True)]

    def _compared(self, turn: str, found: Sequence[EngineAnswer]) -> AnswerTurn:
        tokens = [answer for part in found for answer in part.tokens]
        plain = self._plain.setdefault(turn, tokens)
        same = sum(one == other for one, other in zip(tokens, plain, strict=True))
        return AnswerTurn(sum(len(part.steps) for part in found), same, len(tokens))
