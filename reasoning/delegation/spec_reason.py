"""SpecReason (Pan et al. 2025, arXiv 2504.07891): a small model drafts each step, the base model's score decides."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from agentspec.reasoning.delegation.events import Event, Proposed, Scored
from agentspec.reasoning.delegation.judge import Score, score
from agentspec.reasoning.delegation.model_role import failing
from agentspec.reasoning.delegation.steps import Step
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.reasoning.speculative_task import SpeculativeTask


async def spec_reason(thinking: Thinking, settings: SpecReasonSettings) -> AsyncGenerator[Event]:
    """Draft, score, then keep or rewrite, until the thinking is over.

    While a step is scored the small model already drafts the one behind it, which is cancelled if the step is
    rejected. Without a judge or a small model the base model writes on alone.
    """
    async with SpeculativeTask[Step]() as ahead:
        while thinking.over is None:
            rejected = None
            if drafting(thinking, settings):
                if not ahead:
                    ahead.begin(thinking.draft(thinking.context("small")))
                try:
                    step = await ahead.take()
                except Exception as error:
                    if not failing(error):
                        raise
                    yield thinking.give_up("small", error)
                    continue
                yield Proposed(step)
                if settings.pipelined and not final(thinking, step):
                    ahead.begin(next_draft(thinking, step))
                try:
                    verdict = await score(thinking, step, settings.score, settings.score_timeout)
                except Exception as error:
                    if not failing(error):
                        raise
                    verdict = Score(0.0, reason="no judge")
                    yield thinking.give_up("judge", error)
                accepted = thinking.has("judge") and verdict.value >= settings.threshold
                yield Scored(verdict.value, accepted, verdict.seconds, verdict.reason)
                if accepted:
                    async with aclosing(thinking.keep(step)) as events:
                        async for event in events:
                            yield event
                    continue
                await ahead.drop()
                rejected = step
            async with aclosing(thinking.write("base", rejected=rejected)) as events:
                async for event in events:
                    yield event


def drafting(thinking: Thinking, settings: SpecReasonSettings) -> bool:
    """Whether the small model drafts the next step."""
    begun = len(thinking.steps) >= settings.first_steps
    return begun and thinking.has("small") and thinking.has("judge") and thinking.room("small") > 0


def final(thinking: Thinking, step: Step) -> bool:
    """Whether nothing will be drafted behind `step`, should it be accepted."""
    marks = thinking.settings.answer_marks
    ends = step.ending in ("closed", "stop") or step.blank or any(mark in step.text for mark in marks)
    return ends or not thinking.room("small", pending=step.tokens)


async def next_draft(thinking: Thinking, step: Step) -> Step:
    """What the small model writes behind `step`, should it be accepted."""
    context = thinking.context("small").fork()
    await context.extend(step.text, step.token_ids)
    return await thinking.draft(context, thinking.ration("small", pending=step.tokens))
