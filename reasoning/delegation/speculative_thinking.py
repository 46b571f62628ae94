"""Speculative Thinking (Yang et al. 2025, arXiv 2504.12329): a small model thinks, and hands over where it doubts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentspec.reasoning.delegation.events import Proposed, Triggered
from agentspec.reasoning.delegation.steps import BOUNDARY, Step
from agentspec.reasoning.delegation.thinking import Algorithm, Thinking
from agentspec.reasoning.settings import SpeculativeThinkingSettings

WARM_UP = 256  # tokens before the base model's share of them is meaningful
MORE_DOUBTS, MORE_TOKENS = 5, 25
OVERLOAD_TEXT = "Let me check whether there are some wrong steps:"

_POSITIVE = re.compile(r"\b(?:yeah|yes|final answer|confident)\b", re.I)
_NEGATIVE = re.compile(r"\b(?:wait|alternatively|hold on|another|verify)\b", re.I)
_VERIFY = re.compile(r"\b(?:verify|think again|recap|check)\b", re.I)


@dataclass(slots=True)
class Overload:
    """The third trigger: after `limit` doubts the base model checks for `tokens` tokens, each time later and longer."""

    settings: SpeculativeThinkingSettings
    doubts: int = 0
    times: int = 0

    @property
    def due(self) -> bool:
        limit = self.settings.overload + MORE_DOUBTS * self.times
        return self.doubts >= min(limit, self.settings.overload_most)

    def take(self) -> int:
        """The tokens of the check that is due now."""
        tokens = self.settings.rescue_tokens + MORE_TOKENS * self.times
        self.doubts, self.times = 0, self.times + 1
        return min(tokens, self.settings.rescue_most)


async def speculative_thinking(thinking: Thinking, settings: SpeculativeThinkingSettings) -> None:
    """At every blank line: too many doubts so far, a mood in the next words, a verification begun?

    The words that were looked at are kept unless the base model replaces them. Without its small model the base model
    thinks on alone.
    """
    overload = Overload(settings)
    if not settings.small_reasons and settings.begin_tokens:
        await thinking.emit(Triggered("begin"))
        await hand_over(thinking, settings.begin_tokens)
        await finish(thinking)
    while thinking.over is None:
        if not thinking.has("small"):
            await thinking.write("base")
        elif overload.due and may_hand_over(thinking, settings, settings.rescue_tokens):
            await thinking.emit(Triggered("overload", f"{overload.doubts} doubts"))
            await thinking.keep(Step(f"{OVERLOAD_TEXT}\n", "base", "length"))
            await hand_over(thinking, overload.take())
            await finish(thinking)
        else:
            await paragraph(thinking, settings, overload)


async def paragraph(thinking: Thinking, settings: SpeculativeThinkingSettings, overload: Overload) -> None:
    """One paragraph: its first words by the model that the mood of the small model's calls for, the rest by the small
    model.
    """
    peek = None
    async with thinking.degrading("small"):
        peek = await thinking.draft(thinking.context("small"), thinking.limits("small", settings.peek_tokens))
    if peek is None:
        return
    await thinking.emit(Proposed(peek))
    mood = classify(peek.text)
    overload.doubts += mood < 0
    fires = mood != 0 or not settings.small_reasons or peek.blank
    if fires and may_hand_over(thinking, settings, settings.peek_tokens):
        await thinking.emit(Triggered("reflection", {1: "affirmation", -1: "doubt"}.get(mood, "paragraph")))
        await thinking.write("base", thinking.limits("base", settings.peek_tokens), rejected=peek)
    else:
        await thinking.keep(peek)
    verifies = _VERIFY.search(thinking.steps[-1].text) is not None
    if thinking.over is None and verifies and may_hand_over(thinking, settings, settings.verify_tokens):
        await thinking.emit(Triggered("verification"))
        await hand_over(thinking, settings.verify_tokens)
    await finish(thinking)


async def finish(thinking: Thinking) -> None:
    """The small model writes to the paragraph's end, unless that is here. What it wrote before it failed stays."""
    if thinking.over is None and thinking.has("small") and not thinking.steps[-1].text.endswith(BOUNDARY):
        async with thinking.degrading("small"):
            await thinking.write("small")


async def hand_over(thinking: Thinking, tokens: int) -> None:
    """The base model writes `tokens` tokens, over blank lines too."""
    await thinking.write("base", thinking.limits("base", tokens, across=True))


def may_hand_over(thinking: Thinking, settings: SpeculativeThinkingSettings, tokens: int) -> bool:
    """Whether `tokens` more by the base model keep its share of all tokens within the setting."""
    kept = thinking.counts.kept
    return kept["base"] + tokens <= settings.max_base_share * max(WARM_UP, thinking.counts.all_kept + tokens)


def classify(text: str) -> int:
    """1 for words that affirm, -1 for words that doubt or for as many of both, 0 for neither."""
    positive, negative = len(_POSITIVE.findall(text)), len(_NEGATIVE.findall(text))
    return (positive > negative) - (negative >= positive > 0 or negative > positive)


ALGORITHM = Algorithm(speculative_thinking)
