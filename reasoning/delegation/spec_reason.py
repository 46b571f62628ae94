"""SpecReason (Pan et al. 2025, arXiv 2504.07891): a small model drafts each step, and the judge's score decides."""

from __future__ import annotations

import asyncio
import time

from agentspec.reasoning.delegation.model_role import Context, StepLimits
from agentspec.reasoning.delegation.steps import Step
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.reasoning.tasks import cancel_tasks, task_result

# The wording of the paper's program (spec_reason.py): scores depend on it, and with it the threshold.
QUESTION = """\
Evaluate the last reasoning step solely based on factual correctness and logical validity. Ignore style, phrasing, or \
overall usefulness\u2014only judge whether the step is objectively correct and logically follows from prior steps. \
Assign a score from 0 to 9."""
PREFILL = "I think the quality score is: "


async def spec_reason(thinking: Thinking, settings: SpecReasonSettings) -> None:
    """Draft, score, then keep or rewrite, until the thinking is over.

    While the judge scores a step, the small model already drafts the next step, which is cancelled if the first is
    rejected. If the judge or the small model fails, the base model continues alone. As published, a mark that closes
    the thinking ends nothing: it is removed from a step once that is scored.
    """
    thinking.ignore_closing()
    ahead: asyncio.Task[Step] | None = None  # the small model's next step, assuming that this one is accepted
    try:
        while thinking.over is None:
            draft = step = None
            if may_draft(thinking):
                async with thinking.degrading("small"):
                    draft = await (task_result(ahead) if ahead else thinking.draft(thinking.context("small")))
                ahead = None
            if draft is not None:
                step = draft.without(settings.think_end)
                thinking.propose(step)
                if not is_final(thinking, step):
                    context, limits = thinking.context("small").fork(), thinking.limits("small", pending=step.tokens)
                    ahead = asyncio.create_task(draft_behind(thinking, context, limits, step))
                if await accepts(thinking, step if step.blank else draft, settings):
                    await thinking.keep(step)
                    continue
                await cancel_tasks(ahead)
                ahead = None
            await thinking.write("base", rejected=step)
    finally:
        await cancel_tasks(ahead)


async def accepts(thinking: Thinking, step: Step, settings: SpecReasonSettings) -> bool:
    """Whether the judge's score of `step`, from 0 to 9, reaches the threshold. A blank step gets 0 unjudged, and if 0
    is enough, so does every step.
    """
    began, score, reason = time.perf_counter(), 0.0, "blank" if step.blank else "no judge"
    if not settings.threshold:
        reason = "threshold 0"
    elif not step.blank:
        async with thinking.degrading("judge"):
            text = await judged(thinking, step, settings)
            reason = "" if text.isdecimal() else f"no digit: {text[:20]!r}"
            score = 0.0 if reason else float(text)  # a number that is the whole token, as published (" 7" is none)
    accepted = thinking.has("judge") and score >= settings.threshold
    seconds = time.perf_counter() - began
    thinking.decisions.add("scored", value=score, accepted=accepted, seconds=seconds, reason=reason)
    return accepted


async def judged(thinking: Thinking, step: Step, settings: SpecReasonSettings) -> str:
    """The judge's word on `step` as the next step of the thinking. Raises what the judge's backend raises."""
    judge, context = thinking.roles["judge"], thinking.context("judge").fork()
    await context.extend(step.text, step.token_ids, None if judge is thinking.roles[step.author] else step.author)
    prefill = settings.think_start.strip() + PREFILL  # the published answer opens a thinking, too
    return await judge.first_token(
        await context.asking(QUESTION, prefill), settings.call_timeout, thinking.spend("judge")
    )


def may_draft(thinking: Thinking) -> bool:
    """Whether the small model drafts the next step."""
    return thinking.has("small") and thinking.has("judge") and thinking.room("small") > 0


def is_final(thinking: Thinking, step: Step) -> bool:
    """Whether the small model will draft no further step if `step` is accepted."""
    marks = thinking.settings.answer_marks
    ends = step.ending == "stop" or step.blank or any(mark in step.text for mark in marks)
    return ends or not thinking.room("small", pending=step.tokens)


async def draft_behind(thinking: Thinking, context: Context, limits: StepLimits, step: Step) -> Step:
    """Let the small model draft the step after `context` and `step`, assuming that `step` is accepted."""
    await context.extend(step.text, step.token_ids)
    return await thinking.draft(context, limits)
