"""Speculative Thinking (Yang et al. 2025, arXiv 2504.12329): a small model thinks; the base model helps at doubts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from agentspec.reasoning.delegation.events import Proposed, Triggered
from agentspec.reasoning.delegation.steps import Step
from agentspec.reasoning.delegation.thinking import Algorithm, Thinking
from agentspec.reasoning.settings import SpeculativeThinkingSettings

MOODS = {1: "affirmation", -1: "doubt", 0: "paragraph"}


@dataclass(slots=True)
class Overload:
    """The third trigger: after many doubts the base model checks the thinking, each time later and with more tokens."""

    settings: SpeculativeThinkingSettings
    doubts: int = 0
    times: int = 0

    @property
    def due(self) -> bool:
        limit = self.settings.overload + self.settings.overload_more * self.times
        return self.doubts >= (min(limit, self.settings.overload_most) if self.times else limit)

    def take(self) -> int:
        """Begin the check that is due, and return how many tokens it may take."""
        tokens = self.settings.rescue_tokens + self.settings.rescue_more * self.times
        tokens = min(tokens, self.settings.rescue_most) if self.times else tokens
        self.doubts, self.times = 0, self.times + 1
        return tokens


class Lexicon:
    """The words that tell the mood of a text. As published they are counted anywhere, also inside other words; under
    the rule `economical` as whole words.
    """

    def __init__(self, settings: SpeculativeThinkingSettings) -> None:
        edges = (r"(?<!\w)", r"(?!\w)") if settings.rule == "economical" else ("", "")
        doubting = (*settings.negative_words, *settings.verify_words)
        self._positive, self._negative, self._verify = (
            [re.compile(re.escape(word.lower()).join(edges)) for word in words]
            for words in (settings.positive_words, doubting, settings.verify_words)
        )

    def mood(self, text: str) -> int:
        """1 if most mood words in `text` affirm, -1 if they doubt or are balanced, 0 without mood words."""
        positive, negative = _count(self._positive, text), _count(self._negative, text)
        return (positive > negative) - (negative >= positive > 0 or negative > positive)

    def verifies(self, text: str) -> bool:
        """Whether `text` holds a word that begins a verification."""
        return _count(self._verify, text) > 0


def _count(words: Iterable[re.Pattern[str]], text: str) -> int:
    lower = text.lower()
    return sum(len(word.findall(lower)) for word in words)


async def speculative_thinking(thinking: Thinking, settings: SpeculativeThinkingSettings) -> None:
    """The small model writes paragraphs; behind each blank line three triggers are checked.

    They are, in this order: many doubts so far, mood words in what the small model would write next, and a
    verification in what was kept instead. If the small model fails, or once `spend_tokens` are generated, the base
    model continues alone.
    """
    lexicon, overload = Lexicon(settings), Overload(settings)
    if not settings.small_reasons and settings.begin_tokens:
        await thinking.emit(Triggered("begin"))
        await hand_over(thinking, settings.begin_tokens)
    while thinking.over is None:
        if not (thinking.has("small") and thinking.room("small")):
            await thinking.write("base")
            continue
        async with thinking.degrading("small"):
            helped = thinking.steps and thinking.steps[-1].text == settings.help_think_word
            await thinking.write("small", thinking.limits("small", within=False if helped else None))
        delegates = thinking.over is None and thinking.has("small") and thinking.room("small") > 0
        if delegates and thinking.steps[-1].ending == "boundary":
            await look_ahead(thinking, settings, lexicon, overload)


async def look_ahead(
    thinking: Thinking, settings: SpeculativeThinkingSettings, lexicon: Lexicon, overload: Overload
) -> None:
    """Check the triggers at a blank line."""
    if overload.due:
        await thinking.emit(Triggered("overload", f"{overload.doubts} doubts"))
        await thinking.keep(Step(settings.help_recap_words, "base", "length"))
        await hand_over(thinking, overload.take())
        return
    if settings.help_think_word:
        await thinking.keep(Step(settings.help_think_word, "base", "length"))
    peek = None
    async with thinking.degrading("small"):
        limits = thinking.limits("small", settings.peek_tokens, across=True)
        peek = await thinking.draft(thinking.context("small"), limits)
    if peek is None:
        return
    await thinking.emit(Proposed(peek))
    if peek.blank and peek.ending == "stop" and not thinking.roles["small"].tells_ends:
        await thinking.keep(peek)  # what was taken for a blank line was the small model's end
        return
    mood = lexicon.mood(peek.text)
    if mood != 0 or not settings.small_reasons:
        await reflect(thinking, settings, lexicon, overload, peek)
    elif settings.rule == "economical":  # as published, the small model draws these words again
        await thinking.keep(peek)


async def reflect(
    thinking: Thinking, settings: SpeculativeThinkingSettings, lexicon: Lexicon, overload: Overload, peek: Step
) -> None:
    """Let the base model write its words in place of `peek`, and more of them where what is kept verifies something."""
    mood = lexicon.mood(peek.text)
    await thinking.emit(Triggered("reflection", MOODS[mood]))
    limits = thinking.limits("base", settings.peek_tokens, across=True)
    if settings.choose_large:
        await thinking.write("base", limits, rejected=peek)
    else:
        own = await thinking.draft(thinking.context("base"), limits, "base")
        other = lexicon.mood(own.text)
        if (mood < 0 <= other) or (other < 0 < mood):
            await thinking.keep(own, rejected=peek)
        else:
            await thinking.keep(peek)
    kept = thinking.steps[-1].text
    overload.doubts += lexicon.mood(kept) < 0
    if thinking.over is None and lexicon.verifies(kept):
        await thinking.emit(Triggered("verification"))
        await hand_over(thinking, settings.verify_tokens)


async def hand_over(thinking: Thinking, tokens: int) -> None:
    """Let the base model write `tokens` tokens; blank lines do not stop it."""
    await thinking.write("base", thinking.limits("base", tokens, across=True))


ALGORITHM = Algorithm(speculative_thinking)
