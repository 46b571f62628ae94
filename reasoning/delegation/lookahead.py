"""Lookahead Reasoning (Fu et al. 2025, arXiv 2506.19830): compares drafted steps with the base model's own steps."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from agentspec.backends.chat_templates import escape_markers
from agentspec.reasoning.delegation.model_role import Context, StepLimits, message
from agentspec.reasoning.delegation.steps import Step
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import LookaheadSettings
from agentspec.reasoning.tasks import cancel_tasks, task_result

# The wording of the paper's program (lr.py), for a judge that sees the two steps alone.
QUESTION = """\
Evaluate whether the following two reasoning steps (s1 and s2) convey exactly the same meaning. Focus on semantic \
similarity rather than exact wording.\x20

Compare the main ideas, key points, overall message, logical structure, and numerical calculations/results of both \
reasoning steps.

If the reasoning steps convey essentially the same meaning and generate same calculation results, respond with \
[aligned].
If the reasoning steps express different meanings, respond with [unaligned]. If it is too hard to determine, respond \
with [unaligned]

Please directly provide the final result in [aligned] or [unaligned].

Reasoning step 1 (s1):
<start_s1>
{own}
<end_s1>

Reasoning step 2 (s2):
<start_s2>
{draft}
<end_s2>"""
PREFILL = "["

_STEP_MARKS = re.compile(r"<(?=(?:start|end)_s[12]>)")


@dataclass(slots=True)
class DraftChain:
    """Drafts of the small model, each after the one before, and the base model's own step after each of them.

    `window` has room for the drafts that may be ahead of those that were accepted, so that drafting and the base
    model's calls go on while drafts are accepted. In `drafts` None follows the last one.
    """

    thinking: Thinking
    window: asyncio.Semaphore
    drafts: asyncio.Queue[Step | None] = field(default_factory=asyncio.Queue)
    own: list[asyncio.Task[Step]] = field(default_factory=list)
    failure: Exception | None = None  # the error that stopped the small model
    _drafted_tokens: int = 0
    _kept_before: int = 0
    _growing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> DraftChain:
        self._kept_before = self.thinking.kept.total()
        self._write(self.thinking.context("base"), self.thinking.limits("base"))
        self._growing = asyncio.create_task(self._grow())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await cancel_tasks(self._growing)
        await cancel_tasks(*self.own)

    async def _grow(self) -> None:
        small, base = self.thinking.context("small").fork(), self.thinking.context("base").fork()
        cut = self.thinking.inside_paragraph
        try:
            while await self.window.acquire() and self.thinking.room("small", self._pending) > 0:
                limits = self.thinking.limits("small", pending=self._pending, within=cut)
                step = await self.thinking.draft(small, limits)
                self._drafted_tokens += step.tokens
                await small.extend(step.text, step.token_ids)
                await base.extend(step.text, step.token_ids, step.author)
                cut = step.ending != "boundary"
                self._write(base, self.thinking.limits("base", pending=self._pending, within=cut))
                self.drafts.put_nowait(step)
                if cut:  # nothing drafted after it could be accepted
                    break
        except Exception as error:
            self.failure = error
        finally:
            self.drafts.put_nowait(None)

    @property
    def _pending(self) -> int:
        """Drafted tokens that are not accepted yet."""
        return max(0, self._drafted_tokens - (self.thinking.kept.total() - self._kept_before))

    def _write(self, context: Context, limits: StepLimits) -> None:
        """Let the base model write its own step after `context`."""
        self.own.append(asyncio.create_task(self.thinking.draft(context.fork(), limits, "base")))


async def lookahead(thinking: Thinking, settings: LookaheadSettings) -> None:
    """Keep drafts while they match the base model's own steps, then the first of its steps that differs."""
    while thinking.over is None:
        if not may_draft(thinking):
            await thinking.write("base")
            continue
        async with DraftChain(thinking, asyncio.Semaphore(settings.depth)) as chain:
            await verify(thinking, chain)
            async with thinking.degrading("small"):
                if chain.failure is not None:
                    raise chain.failure


def may_draft(thinking: Thinking) -> bool:
    """Whether a draft could be accepted as the next step: after a cut step none is."""
    judged = thinking.has("judge") and not thinking.inside_paragraph
    return judged and thinking.has("small") and thinking.room("small") > 0


async def verify(thinking: Thinking, chain: DraftChain) -> None:
    """Keep drafts until one differs from the base model's own step, then keep the base model's step instead."""
    index = 0
    while thinking.over is None:
        own = await task_result(chain.own[index])
        draft = await chain.drafts.get()
        same = draft is not None and await matches(thinking, draft, own)
        if draft is None or not same:
            await thinking.keep(own, rejected=draft)
            return
        await thinking.keep(draft)
        chain.window.release()
        index += 1


async def matches(thinking: Thinking, draft: Step, own: Step) -> bool:
    """Whether the draft may replace the base model's own step; False if the judge fails."""
    thinking.propose(draft)
    began, same, reason = time.perf_counter(), False, ""
    if draft.blank or own.blank or not may_replace(thinking, draft, own):
        pass
    elif _letters(draft) == _letters(own):  # this needs no judge
        same = True
    elif thinking.has("judge"):
        reason = "no judge"
        async with thinking.degrading("judge"):
            same, reason = await aligned(thinking, draft, own), ""
    seconds = time.perf_counter() - began
    thinking.decisions.add("scored", value=float(same), accepted=same, seconds=seconds, reason=reason)
    return same


async def aligned(thinking: Thinking, draft: Step, own: Step) -> bool:
    """Whether the judge says that `draft` and `own`, two next steps of the thinking so far, mean the same.

    The judge generates one token after "[", which accepts if it holds "ali" and not "un".
    """
    question = QUESTION.format(draft=quoted(draft.text), own=quoted(own.text))
    alone, judge = thinking.request_for([message("user", question)]), thinking.roles["judge"]
    context = await judge.open(alone, thinking.settings.think_start, PREFILL)
    text = await judge.first_token(context, thinking.settings.call_timeout, thinking.spend("judge"))
    return "ali" in text.lower() and "un" not in text.lower()


def quoted(text: str) -> str:
    """Escape `text` so that it can neither close the marks around a step in the question nor open a chat turn."""
    return _STEP_MARKS.sub("< ", escape_markers(text.strip()))


def _letters(step: Step) -> str:
    return step.text.replace(" ", "").replace("\n", "").lower()


def may_replace(thinking: Thinking, draft: Step, own: Step) -> bool:
    """Whether the ways in which the two steps ended allow it, whatever they say."""
    ends_alike = own.ending != "stop" and (draft.ending == "closed") == (own.ending == "closed")
    return ends_alike and not thinking.inside_paragraph  # the base model's own end of the thinking counts
