"""Lookahead Reasoning (Fu et al. 2025, arXiv 2506.19830): steps drafted ahead, compared with the base model's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from agentspec.backends.base import Embeds
from agentspec.reasoning.delegation.context import Context
from agentspec.reasoning.delegation.events import Event, Proposed, Scored
from agentspec.reasoning.delegation.judge import aligned, equal
from agentspec.reasoning.delegation.model_role import failing
from agentspec.reasoning.delegation.steps import Step
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import LookaheadSettings
from agentspec.reasoning.speculative_task import cancel_tasks, task_result

RATE = 0.2  # how fast a measured time or an outcome is followed
PRIOR = 0.6  # acceptance before anything is known
RETURN = 0.1  # how fast it comes back while nothing is drafted, so that drafting is tried again


@dataclass(slots=True)
class DepthPlanner:
    """How many steps to draft: those with the most expected steps per second, from what was measured.

    Expected steps of a round at acceptance a and depth d are (1 - a^(d+1)) / (1 - a) (section 3 of the paper). A round
    takes d drafted steps one after another and, behind the last of them, one of the base model; how much slower the
    base model is while it writes d + 1 steps at once is learned.
    """

    most: int
    acceptance: float = PRIOR
    draft_seconds: float = 0.0
    own_seconds: dict[int, float] = field(default_factory=dict)

    def depth(self) -> int:
        if not self.own_seconds or not self.draft_seconds:
            return self.most
        return max(range(self.most + 1), key=lambda depth: self.steps(depth) / self.seconds(depth))

    def steps(self, depth: int) -> float:
        return sum(self.acceptance**i for i in range(depth + 1))

    def seconds(self, depth: int) -> float:
        """Expected time of a round. A depth that was never tried costs what the nearest one did."""
        nearest = min(self.own_seconds, key=lambda known: abs(known - depth))
        return depth * self.draft_seconds + self.own_seconds[nearest]

    def drafted(self, seconds: float) -> None:
        self.draft_seconds += (seconds - self.draft_seconds) * (RATE if self.draft_seconds else 1.0)

    def wrote(self, depth: int, seconds: float) -> None:
        known = self.own_seconds.get(depth, seconds)
        self.own_seconds[depth] = known + RATE * (seconds - known)
        if depth == 0:
            self.acceptance += RETURN * (PRIOR - self.acceptance)

    def judged(self, accepted: bool) -> None:
        self.acceptance += RATE * (accepted - self.acceptance)


@dataclass(slots=True)
class DraftChain:
    """One round under way: the small model's steps one behind another, and the base model's own step behind each."""

    thinking: Thinking
    depth: int
    pace: DepthPlanner
    drafts: list[Step] = field(default_factory=list)
    own: list[asyncio.Task[Step]] = field(default_factory=list)
    _grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    _growing: asyncio.Task[None] | None = None
    failure: Exception | None = None
    whole: bool = False

    async def __aenter__(self) -> DraftChain:
        self.own.append(self._write(self.thinking.context("base").fork()))
        self._growing = asyncio.create_task(self._grow())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await cancel_tasks(*([self._growing] if self._growing else []))
        await cancel_tasks(*self.own)

    async def draft(self, index: int) -> Step | None:
        """The draft at `index`, waited for; None if the chain ends before it."""
        async with self._grown:
            await self._grown.wait_for(lambda: len(self.drafts) > index or self.whole)
        return self.drafts[index] if len(self.drafts) > index else None

    async def _grow(self) -> None:
        small, base = self.thinking.context("small").fork(), self.thinking.context("base").fork()
        ahead = 0
        try:
            while len(self.drafts) < self.depth and self.thinking.room("small", ahead):
                step = await self.thinking.draft(small, self.thinking.ration("small", pending=ahead))
                ahead += step.tokens
                self.pace.drafted(step.seconds)
                await small.extend(step.text, step.token_ids)
                await base.extend(step.text)
                self.own.append(self._write(base.fork(), ahead))
                await self._tell(step)
                if step.ending != "boundary":
                    break
        except Exception as error:
            self.failure = error
        finally:
            self.whole = True
            await asyncio.shield(self._tell(None))

    async def _tell(self, step: Step | None) -> None:
        async with self._grown:
            if step is not None:
                self.drafts.append(step)
            self._grown.notify_all()

    def _write(self, context: Context, ahead: int = 0) -> asyncio.Task[Step]:
        pen = self.thinking.ration("base", pending=ahead)
        return asyncio.create_task(self.thinking.draft(context, pen, "base"))


async def lookahead(thinking: Thinking, settings: LookaheadSettings) -> AsyncGenerator[Event]:
    """Rounds of drafted steps: keep those that the base model would have made too, then one step of its own."""
    pace = DepthPlanner(settings.depth)
    while thinking.over is None:
        depth = pace.depth() if thinking.has("small") and thinking.room("small") else 0
        if depth == 0:
            began = time.perf_counter()
            async with aclosing(thinking.write("base")) as events:
                async for event in events:
                    yield event
            pace.wrote(0, time.perf_counter() - began)
            continue
        async with DraftChain(thinking, depth, pace) as chain:
            async with aclosing(_round(thinking, settings, chain)) as events:
                async for event in events:
                    yield event
            if chain.failure is not None:
                if not failing(chain.failure):
                    raise chain.failure
                yield thinking.give_up("small", chain.failure)


async def _round(thinking: Thinking, settings: LookaheadSettings, chain: DraftChain) -> AsyncGenerator[Event]:
    """Keep drafts up to the first that differs from the base model's own step, and that step in its place."""
    for index in range(chain.depth + 1):
        own = await task_result(chain.own[index])
        chain.pace.wrote(chain.depth, own.seconds)
        draft = await chain.draft(index) if index < chain.depth else None
        same = False
        if draft is None:
            kept = thinking.keep(own)
        else:
            yield Proposed(draft)
            began, reason = time.perf_counter(), ""
            try:
                same = await _same(thinking, settings, draft, own)
            except Exception as error:
                if not failing(error):
                    raise
                reason = "no judge"
                yield thinking.give_up("judge", error)
            chain.pace.judged(same)
            yield Scored(float(same), same, time.perf_counter() - began, reason)
            kept = thinking.keep(draft) if same else thinking.keep(own, rejected=draft)
        async with aclosing(kept) as events:
            async for event in events:
                yield event
        if not same or thinking.over:
            return


async def _same(thinking: Thinking, settings: LookaheadSettings, draft: Step, own: Step) -> bool:
    """Whether the draft may stand for the base model's own step. Half a step never may."""
    if draft.ending == "length" or draft.blank:
        return False
    if equal(draft, own):
        return draft.ending == own.ending
    if settings.compare == "equal" or not thinking.has("judge"):
        return False
    if settings.compare == "judge":
        return await aligned(thinking, draft, own, settings.score_timeout)
    judge = thinking.writer("judge")
    assert isinstance(judge.backend, Embeds)
    async with asyncio.timeout(settings.score_timeout):
        one, other = await judge.backend.embed([draft.text, own.text], judge.model)
    return _cosine(one, other) >= settings.similarity


def _cosine(one: list[float], other: list[float]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    norms = sum(a * a for a in one) * sum(b * b for b in other)
    return dot / norms**0.5 if norms else 0.0
