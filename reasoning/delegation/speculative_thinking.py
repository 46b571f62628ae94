"""Speculative Thinking (Yang et al. 2025, arXiv 2504.12329): a small model thinks; the base model helps at doubts."""

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
    """The third trigger: after many doubts the base model checks the thinking, each time later and with more tokens."""

    settings: SpeculativeThinkingSettings
    doubts: int = 0
    times: int = 0

    @property
    def due(self) -> bool:
        limit = self.settings.overload + MORE_DOUBTS * self.times
        return self.doubts >= min(limit, self.settings.overload_most)

    def take(self) -> int:
        """Begin the check that is due, and return how many tokens it may take."""
        tokens = self.settings.rescue_tokens + MORE_TOKENS * self.times
        self.doubts, self.times = 0, self.times + 1
        return min(tokens, self.settings.rescue_most)


async def speculative_thinking(thinking: Thinking, settings: SpeculativeThinkingSettings) -> None:
    """Check three triggers at every blank line: many doubts so far, mood words next, the start of a verification.

    The small model's next words are kept unless the base model replaces them. If the small model fails, the base model
    continues alone.
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
    """Write one paragraph. The small model drafts the first words; their mood decides whether the base model rewrites
    them. The small model writes the rest.
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
    """Let the small model finish the paragraph if it is unfinished. Text that it wrote before a failure is kept."""
    if thinking.over is None and thinking.has("small") and not thinking.steps[-1].text.endswith(BOUNDARY):
        async with thinking.degrading("small"):
            await thinking.write("small")


async def hand_over(thinking: Thinking, tokens: int) -> None:
    """Let the base model write `tokens` tokens; blank lines do not stop it."""
    await thinking.write("base", thinking.limits("base", tokens, across=True))


def may_hand_over(thinking: Thinking, settings: SpeculativeThinkingSettings, tokens: int) -> bool:
    """Whether the base model's share of all tokens stays within the setting if it writes `tokens` more."""
    kept = thinking.counts.kept
    return kept["base"] + tokens <= settings.max_base_share * max(WARM_UP, thinking.counts.all_kept + tokens)


def classify(text: str) -> int:
    """The mood of `text`: 1 if most mood words affirm, -1 if they doubt or are balanced, 0 without mood words."""
    positive, negative = len(_POSITIVE.findall(text)), len(_NEGATIVE.findall(text))
    return (positive > negative) - (negative >= positive > 0 or negative > positive)


ALGORITHM = Algorithm(speculative_thinking)
