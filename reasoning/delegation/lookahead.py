"""Lookahead Reasoning (Fu et al. 2025, arXiv 2506.19830): compares drafted steps with the base model's own steps."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from agentspec.backends.base import Embeds
from agentspec.errors import ConfigurationError
from agentspec.reasoning.delegation.context import Context
from agentspec.reasoning.delegation.events import Proposed, Scored
from agentspec.reasoning.delegation.judge import aligned, equal
from agentspec.reasoning.delegation.model_role import ModelRole
from agentspec.reasoning.delegation.steps import Step
from agentspec.reasoning.delegation.thinking import Algorithm, Thinking
from agentspec.reasoning.settings import LookaheadSettings
from agentspec.reasoning.speculative_task import cancel_tasks, task_result

RATE = 0.2  # weight of a new measurement in a running mean
PRIOR = 0.6  # acceptance before anything is known
RETURN = 0.1  # rate at which the acceptance returns to PRIOR while nothing is drafted, so that drafting is tried again


@dataclass(slots=True)
class DepthPlanner:
    """Chooses how many steps to draft: the depth with the most expected steps per second, from measured times.

    A round at acceptance a and depth d yields (1 - a^(d+1)) / (1 - a) expected steps (section 3 of the paper). It takes
    the time of d drafted steps, one after another, and of one step of the base model after the last draft. The planner
    learns how long that step takes while the base model writes d + 1 steps at once.
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
        """Expected seconds of a round. An untried depth is assumed to cost what the nearest tried depth does."""
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
    """A running round: the small model drafts a chain of steps, and the base model writes its own step after each."""

    thinking: Thinking
    depth: int
    planner: DepthPlanner
    drafts: list[Step] = field(default_factory=list)
    own: list[asyncio.Task[Step]] = field(default_factory=list)
    failure: Exception | None = None
    complete: bool = False
    _grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    _growing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> DraftChain:
        self.own.append(self._write(self.thinking.context("base").fork()))
        self._growing = asyncio.create_task(self._grow())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await cancel_tasks(*([self._growing] if self._growing else []))
        await cancel_tasks(*self.own)

    async def draft(self, index: int) -> Step | None:
        """Wait for the draft at `index`; None if the chain ends before it."""
        async with self._grown:
            await self._grown.wait_for(lambda: len(self.drafts) > index or self.complete)
        return self.drafts[index] if len(self.drafts) > index else None

    def raise_failure(self) -> None:
        """Raise the error that stopped the small model, if there was one."""
        if self.failure is not None:
            raise self.failure

    async def _grow(self) -> None:
        small, base = self.thinking.context("small").fork(), self.thinking.context("base").fork()
        ahead = 0
        try:
            while len(self.drafts) < self.depth and self.thinking.room("small", ahead):
                step = await self.thinking.draft(small, self.thinking.limits("small", pending=ahead))
                ahead += step.tokens
                self.planner.drafted(step.seconds)
                await small.extend(step.text, step.token_ids)
                await base.extend(step.text)
                self.own.append(self._write(base.fork(), ahead))
                await self._tell(step)
                if step.ending != "boundary":
                    break
        except Exception as error:
            self.failure = error
        finally:
            self.complete = True
            await asyncio.shield(self._tell(None))

    async def _tell(self, step: Step | None) -> None:
        async with self._grown:
            if step is not None:
                self.drafts.append(step)
            self._grown.notify_all()

    def _write(self, context: Context, ahead: int = 0) -> asyncio.Task[Step]:
        limits = self.thinking.limits("base", pending=ahead)
        return asyncio.create_task(self.thinking.draft(context, limits, "base"))


async def lookahead(thinking: Thinking, settings: LookaheadSettings) -> None:
    """Run rounds until the thinking is over: keep drafts that match the base model's steps, then one of its own."""
    planner = DepthPlanner(settings.depth)
    while thinking.over is None:
        depth = planner.depth() if thinking.has("small") and thinking.room("small") else 0
        if depth == 0:
            began = time.perf_counter()
            await thinking.write("base")
            planner.wrote(0, time.perf_counter() - began)
            continue
        async with DraftChain(thinking, depth, planner) as chain:
            await verify(thinking, settings, chain)
            async with thinking.degrading("small"):
                chain.raise_failure()


async def verify(thinking: Thinking, settings: LookaheadSettings, chain: DraftChain) -> None:
    """Keep drafts until one differs from the base model's own step, then keep the base model's step instead."""
    for index in range(chain.depth + 1):
        own = await task_result(chain.own[index])
        chain.planner.wrote(chain.depth, own.seconds)
        draft = await chain.draft(index) if index < chain.depth else None
        same = draft is not None and await matches(thinking, settings, draft, own)
        if draft is not None:
            chain.planner.judged(same)
        await thinking.keep(draft if draft is not None and same else own, rejected=None if same else draft)
        if not same or thinking.over:
            return


async def matches(thinking: Thinking, settings: LookaheadSettings, draft: Step, own: Step) -> bool:
    """Whether the base model's own step means the same as `draft`; False if the judge fails."""
    await thinking.emit(Proposed(draft))
    began, same, reason = time.perf_counter(), False, "no judge"
    async with thinking.degrading("judge"):
        same, reason = await _same(thinking, settings, draft, own), ""
    await thinking.emit(Scored(float(same), same, time.perf_counter() - began, reason))
    return same


async def _same(thinking: Thinking, settings: LookaheadSettings, draft: Step, own: Step) -> bool:
    """Whether the draft may replace the base model's own step. A draft cut off by its token limit never may."""
    if draft.ending == "length" or draft.blank:
        return False
    if equal(draft, own):
        return draft.ending == own.ending
    if settings.compare == "equal" or not thinking.has("judge"):
        return False
    if settings.compare == "judge":
        return await aligned(thinking, draft, own, settings.score_timeout)
    judge = thinking.roles["judge"]
    assert isinstance(judge.backend, Embeds)
    async with asyncio.timeout(settings.score_timeout):
        one, other = await judge.backend.embed([draft.text, own.text], judge.model, thinking.request.tenant)
    return _cosine(one, other) >= settings.similarity


def _cosine(one: list[float], other: list[float]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    norms = sum(a * a for a in one) * sum(b * b for b in other)
    return dot / norms**0.5 if norms else 0.0


def require_embeddings(name: str, settings: LookaheadSettings, role: str, model: ModelRole) -> None:
    """Raises `ConfigurationError` if steps are compared by embeddings and the judge's backend cannot embed."""
    if role == "judge" and settings.compare == "embedding" and not isinstance(model.backend, Embeds):
        raise ConfigurationError(
            f'models.{name}.compare = "embedding" needs a judge whose endpoint embeds texts: set judge to a backend of'
            ' kind "openai", or compare to "judge"'
        )


ALGORITHM = Algorithm(lookahead, check_configured=require_embeddings)
