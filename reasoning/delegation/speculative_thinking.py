"""Speculative Thinking (Yang et al. 2025, arXiv 2504.12329): a small model thinks; the base model helps at doubts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.reasoning.delegation.steps import Step
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import SpeculativeThinkingSettings

# The words and lengths of the paper's program. Words are counted anywhere in a text, also inside other words.
AFFIRMING = ("yeah", "yes", "final answer", "confident")
VERIFYING = ("verify", "think again", "recap", "check")
DOUBTING = ("wait", "alternatively", "hold on", "another", *VERIFYING)
RECAP = "Let me check whether there are some wrong steps:"
OVERLOAD_MORE, OVERLOAD_MOST = 5, 30  # by how much the doubts that are waited for grow, and their most
RESCUE_MORE, RESCUE_MOST = 25, 200  # likewise for the tokens of the check
MOODS = {1: "affirmation", -1: "doubt", 0: "paragraph"}


@dataclass(slots=True)
class Overload:
    """The third trigger: after many doubts the base model checks the thinking, each time later and with more tokens."""

    settings: SpeculativeThinkingSettings
    doubts: int = 0
    times: int = 0

    @property
    def due(self) -> bool:
        limit = self.settings.overload + OVERLOAD_MORE * self.times
        return self.doubts >= (min(limit, OVERLOAD_MOST) if self.times else limit)

    def take(self) -> int:
        """Begin the check that is due, and return how many tokens it may take."""
        tokens = self.settings.rescue_tokens + RESCUE_MORE * self.times
        tokens = min(tokens, RESCUE_MOST) if self.times else tokens
        self.doubts, self.times = 0, self.times + 1
        return tokens


def mood(text: str) -> int:
    """1 if most mood words in `text` affirm, -1 if they doubt or are balanced, 0 without mood words."""
    positive, negative = _count(AFFIRMING, text), _count(DOUBTING, text)
    return (positive > negative) - (negative >= positive > 0 or negative > positive)


def _count(words: Sequence[str], text: str) -> int:
    return sum(map(text.lower().count, words))


async def speculative_thinking(thinking: Thinking, settings: SpeculativeThinkingSettings) -> None:
    """The small model writes paragraphs; after each blank line three triggers are checked.

    They are, in this order: many doubts so far, mood words in what the small model would write next, and a
    verification in what the base model wrote instead. If the small model fails, or once `spend_tokens` are generated,
    the base model continues alone.
    """
    overload = Overload(settings)
    if not settings.small_reasons and settings.begin_tokens:
        thinking.decisions.add("triggered", rule="begin", detail="")
        await hand_over(thinking, settings.begin_tokens)
    while thinking.over is None:
        if not (thinking.has("small") and thinking.room("small")):
            await thinking.write("base")
            continue
        async with thinking.degrading("small"):
            await thinking.write("small")
        delegates = thinking.over is None and thinking.has("small") and thinking.room("small") > 0
        if delegates and thinking.steps[-1].ending == "boundary":
            await look_ahead(thinking, settings, overload)


async def look_ahead(thinking: Thinking, settings: SpeculativeThinkingSettings, overload: Overload) -> None:
    """Check the triggers at a blank line."""
    if overload.due:
        thinking.decisions.add("triggered", rule="overload", detail=f"{overload.doubts} doubts")
        await thinking.keep(Step(RECAP, "base", "length"))
        await hand_over(thinking, overload.take())
        return
    peek = None
    async with thinking.degrading("small"):
        limits = thinking.limits("small", settings.peek_tokens, across=True)
        peek = await thinking.draft(thinking.context("small"), limits)
    if peek is None:
        return
    thinking.propose(peek)
    if peek.blank and peek.ending == "stop" and not thinking.roles["small"].knows_ends:
        await thinking.keep(peek)  # what was taken for a blank line was the small model's end
        return
    if mood(peek.text) != 0 or not settings.small_reasons:  # else the small model draws these words again
        await reflect(thinking, settings, overload, peek)


async def reflect(thinking: Thinking, settings: SpeculativeThinkingSettings, overload: Overload, peek: Step) -> None:
    """Let the base model write its words in place of `peek`, and more of them where these verify something."""
    thinking.decisions.add("triggered", rule="reflection", detail=MOODS[mood(peek.text)])
    await thinking.write("base", thinking.limits("base", settings.peek_tokens, across=True), rejected=peek)
    kept = thinking.steps[-1].text
    overload.doubts += mood(kept) < 0
    if thinking.over is None and _count(VERIFYING, kept):
        thinking.decisions.add("triggered", rule="verification", detail="")
        await hand_over(thinking, settings.verify_tokens)


async def hand_over(thinking: Thinking, tokens: int) -> None:
    """Let the base model write `tokens` tokens; blank lines do not stop it."""
    await thinking.write("base", thinking.limits("base", tokens, across=True))
