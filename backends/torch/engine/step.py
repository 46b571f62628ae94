"""One step of the engine: one forward for every active answer. Schedule, propose, choose, run, draw, commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from traceback import clear_frames

from torch import AcceleratorError, Tensor

from agentspec.backends.torch.engine.sequence import EngineContext, Generation
from agentspec.backends.torch.engine.speculator import NOTHING, Proposal, StepCost, subtree, trunk_first
from agentspec.backends.torch.engine.stats import count
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import synchronize
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.sampler import fetch
from agentspec.speculation.governor import Governor
from agentspec.telemetry.safe_errors import error_location
from agentspec.types import Delta

logger = logging.getLogger(__name__)

Outcome = Delta | Exception | None


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """What one generation does in a step: it reads some of its tokens and, behind the last of them, draws.

    Whatever goes wrong in it is its own `error`; the rest of the step goes on without it.
    """

    generation: Generation
    read: int
    draws: bool
    proposal: Proposal = NOTHING
    logits: Tensor | None = None
    error: Exception | None = None

    @property
    def piece(self) -> BatchItem:
        start, tokens = self.generation.rows.length, self.generation.tokens
        chain = tokens[start : start + self.read]
        return BatchItem(self.generation.rows, chain, self.proposal.tokens, self.proposal.parents, wanted=self.draws)

    def propose(self) -> None:
        self.proposal = self.generation.propose()

    def begin(self) -> None:
        assert self.logits is not None
        self.generation.begin(self.proposal, self.logits)

    def commit(self, bill: StepCost) -> Delta | None:
        if not self.draws:
            self.generation.read(self.read)
            return None
        return self.generation.commit(self.read, self.proposal, bill)


def run_step(generations: Sequence[Generation], shared: EngineContext) -> list[tuple[Generation, Outcome]]:
    """Give every generation its part of one forward and tell what each gained: a delta, nothing, or its own error."""
    scoring = [each for each in generations if each.scorer]
    turns = schedule([each for each in generations if each not in scoring], shared)
    scored: list[tuple[Generation, Outcome]] = [(each, score(each)) for each in scoring]
    if not turns:
        return scored
    for turn in turns:
        if turn.draws:
            isolate_failure(turn, turn.propose)
    bill = allocate_draft_budget(turns, shared.governor)
    synchronize(shared.target.device)  # rows that are still being moved are no part of this step's cost
    tokens, context, started = sum(len(turn.piece) for turn in turns), context_of(turns), perf_counter()
    together = run(turns, shared)
    if not any(turn.draws for turn in turns):
        synchronize(shared.target.device)  # else nothing does, and the step would seem to have cost nothing
    begin_draws(turns)
    for turn in turns:
        turn.generation.learn()
    fetch_draws(turns)
    count(shared.counters.batch_sizes, len(turns))
    count(shared.counters.step_drafts, sum(len(turn.proposal) for turn in turns))
    outcomes = [isolate_failure(turn, partial(turn.commit, bill)) for turn in turns]
    if together:  # sampling included: on a CUDA device it is what waits for the forward
        shared.governor.cost.observe(tokens, context, perf_counter() - started, len(turns))
    return [*scored, *((turn.generation, turn.error or outcome) for turn, outcome in zip(turns, outcomes, strict=True))]


def score(generation: Generation) -> Exception | None:
    """Some of a prompt's tokens are scored, in a forward of their own: the logits of all of them are needed."""
    try:
        if generation.scorer:
            generation.scorer.step()
    except Exception as error:
        return error
    return None


def schedule(generations: Sequence[Generation], shared: EngineContext) -> list[ScheduledSequence]:
    """Answers that draw come first, then prompts in order, in chunks within the step's budget of tokens."""
    turns = [ScheduledSequence(generation, 1, draws=True) for generation in generations if generation.unread == 1]
    budget = shared.governor.chunk(len(turns), context_of(turns), targets_of(turns))
    for generation in generations:
        if generation.unread > 1 and budget > 0:
            most = budget if shared.target.rewindable else generation.unread
            read = min(generation.unread, most)
            turns.append(ScheduledSequence(generation, read, draws=read == generation.unread))
            budget -= read
    return turns


def context_of(turns: Sequence[ScheduledSequence]) -> int:
    """Rows that the turns' tokens look back on."""
    return sum(turn.generation.rows.length for turn in turns)


def targets_of(turns: Sequence[ScheduledSequence]) -> list[float]:
    """The latency targets of running answers, in seconds a token."""
    targets = [turn.generation.job.request.latency_target_ms_per_token for turn in turns]
    return [target / 1000.0 for target in targets if target is not None]


def allocate_draft_budget(turns: Sequence[ScheduledSequence], governor: Governor) -> StepCost:
    """Cut all proposals to what pays for the step as a whole, and estimate what the step costs."""
    drawing = [turn for turn in turns if turn.draws and turn.error is None]
    tokens, context, batch = sum(turn.read for turn in turns), context_of(turns), len(turns)
    plain = governor.cost.seconds(tokens, context, batch)
    if not any(len(turn.proposal) for turn in drawing):
        return StepCost(plain, 0.0, plain / max(1, len(drawing)))
    needs = [turn.generation.needs(plain) for turn in drawing]
    worths = [turn.proposal.worth for turn in drawing]
    chosen = governor.choose(worths, tokens=tokens, context=context, batch=batch, needs=needs)
    for turn, nodes in zip(drawing, chosen, strict=True):
        turn.proposal = subtree(turn.proposal, trunk_first(turn.proposal, nodes))
    drafted = sum(len(turn.proposal) for turn in drawing)
    drafts = governor.cost.seconds(tokens + drafted, context, batch) - plain
    alone = governor.cost.seconds(len(drawing), context, len(drawing))
    return StepCost(plain, drafts, alone / len(drawing))


def run(turns: Sequence[ScheduledSequence], shared: EngineContext) -> bool:
    """The forward; whether it was one for all. If it fails, each sequence goes by itself: whose fault is it?"""
    sound = [turn for turn in turns if turn.error is None]
    if not sound:
        return False
    if not run_together(sound, shared.target):
        shared.relieve()  # only now: the exception held on to all that the forward had computed
        for turn in sound:
            isolate_failure(turn, partial(run_alone, turn, shared.target))
        return False
    return len(sound) == len(turns) and (len(turns) == 1 or shared.target.batched)


def run_together(turns: Sequence[ScheduledSequence], target: TargetModel) -> bool:
    try:
        outputs = target.forward_batch([turn.piece for turn in turns])
    except Exception as error:
        logger.warning("a step of %d answers failed, each is tried alone: %s", len(turns), error_location(error))
        return False
    for turn, logits in zip(turns, outputs, strict=True):
        turn.logits = logits
    return True


def begin_draws(turns: Sequence[ScheduledSequence]) -> None:
    """What can be drawn ahead of the commits is, on the device; the host does not wait for it."""
    for turn in turns:
        if turn.draws:
            isolate_failure(turn, turn.begin)


def fetch_draws(turns: Sequence[ScheduledSequence]) -> None:
    """Bring the draws of all answers to the host in one transfer. If that fails, each fetches its own as it commits."""
    samplers = [turn.generation.sampler for turn in turns if turn.draws and turn.error is None]
    try:
        fetch(samplers)
    except Exception as error:
        logger.warning("the draws of %d answers failed, each is tried alone: %s", len(samplers), error_location(error))


def run_alone(turn: ScheduledSequence, target: TargetModel) -> None:
    (turn.logits,) = target.forward_batch([turn.piece])


def isolate_failure(turn: ScheduledSequence, action: Callable[[], Delta | None]) -> Delta | None:
    """Do it unless something went wrong in this turn before; an exception is the turn's alone.

    Raises `AcceleratorError`: a device that failed computes nothing more in this process.
    """
    if turn.error is not None:
        return None
    try:
        return action()
    except AcceleratorError:
        raise
    except Exception as error:
        clear_frames(error.__traceback__)  # which hold what a failed forward had computed, while others are tried
        turn.error = error
        return None
