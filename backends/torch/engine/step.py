"""One step of the engine: propose, run, draw, commit, in one forward for every scheduled sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter
from traceback import clear_frames

from torch import AcceleratorError

from agentspec.backends.torch.engine.scheduler import Schedule, ScheduledSequence, kv_length
from agentspec.backends.torch.engine.sequence import EngineContext, Sequence
from agentspec.backends.torch.engine.speculator import StepEstimate, depth_first, subtree
from agentspec.backends.torch.engine.stats import count
from agentspec.backends.torch.model.device import synchronize
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.sampler import fetch
from agentspec.speculation.governor import Governor
from agentspec.telemetry.safe_errors import error_location
from agentspec.types import Delta

logger = logging.getLogger(__name__)

Outcome = Delta | Exception | None


def run_step(schedule: Schedule, context: EngineContext) -> list[tuple[Sequence, Outcome]]:
    """Give every sequence its part of one forward and return what each gained: a delta, nothing, or its own error."""
    scored: list[tuple[Sequence, Outcome]] = [(sequence, score(sequence)) for sequence in schedule.scoring]
    scheduled, device = schedule.scheduled, context.target.device
    if not scheduled:
        return scored
    for each in scheduled:
        if each.draws:
            isolate_failure(each, each.propose)
    cost = allocate_draft_budget(scheduled, context.governor)
    synchronize(device)  # slots that are still being moved are no part of this step's cost
    tokens, past, started = sum(len(each.batch_item) for each in scheduled), kv_length(scheduled), perf_counter()
    batched = run(scheduled, context)
    if not any(each.draws for each in scheduled):
        synchronize(device)  # else nothing does, and the step would seem to have cost nothing
    draw(scheduled)
    count(context.counters.batch_sizes, len(scheduled))
    count(context.counters.step_drafts, sum(len(each.proposal) for each in scheduled))
    deltas = [isolate_failure(each, partial(each.commit, cost)) for each in scheduled]
    if batched:  # sampling included: on a CUDA device it is what waits for the forward
        context.governor.cost.observe(tokens, past, perf_counter() - started, len(scheduled))
    return [*scored, *((each.sequence, each.error or delta) for each, delta in zip(scheduled, deltas, strict=True))]


def score(sequence: Sequence) -> Exception | None:
    """Some of a prompt's tokens are scored, in a forward of their own: the logits of all of them are needed."""
    try:
        if sequence.scorer:
            sequence.scorer.step()
    except Exception as error:
        return error
    return None


def allocate_draft_budget(scheduled: list[ScheduledSequence], governor: Governor) -> StepEstimate:
    """Cut all proposals to what pays for the step as a whole, and estimate what the step costs."""
    drawing = [each for each in scheduled if each.draws and each.error is None]
    tokens, past, batch = sum(each.num_tokens for each in scheduled), kv_length(scheduled), len(scheduled)
    plain = governor.cost.seconds(tokens, past, batch)
    if not any(len(each.proposal) for each in drawing):
        return StepEstimate(plain, 0.0, plain / max(1, len(drawing)))
    required = [each.sequence.required_tokens(plain) for each in drawing]
    acceptances = [each.proposal.acceptance for each in drawing]
    chosen = governor.choose(acceptances, tokens=tokens, context=past, batch=batch, required_tokens=required)
    for each, nodes in zip(drawing, chosen, strict=True):
        each.proposal = subtree(each.proposal, depth_first(each.proposal, nodes))
    drafted = sum(len(each.proposal) for each in drawing)
    drafts = governor.cost.seconds(tokens + drafted, past, batch) - plain
    alone = governor.cost.seconds(len(drawing), past, len(drawing))
    return StepEstimate(plain, drafts, alone / len(drawing))


def run(scheduled: list[ScheduledSequence], context: EngineContext) -> bool:
    """The forward; returns whether it was one for all. If it fails, each sequence is run alone to find the culprit."""
    sound = [each for each in scheduled if each.error is None]
    if not sound:
        return False
    if not run_together(sound, context.target):
        context.free_memory()  # only now: the exception held on to all that the forward had computed
        for each in sound:
            isolate_failure(each, partial(run_alone, each, context.target))
        return False
    return len(sound) == len(scheduled) and (len(scheduled) == 1 or context.target.batched)


def run_together(scheduled: list[ScheduledSequence], target: TargetModel) -> bool:
    try:
        outputs = target.forward_batch([each.batch_item for each in scheduled])
    except Exception as error:
        logger.warning("a step of %d answers failed, each is tried alone: %s", len(scheduled), error_location(error))
        return False
    for each, logits in zip(scheduled, outputs, strict=True):
        each.logits = logits
    return True


def run_alone(each: ScheduledSequence, target: TargetModel) -> None:
    (each.logits,) = target.forward_batch([each.batch_item])


def draw(scheduled: list[ScheduledSequence]) -> None:
    """Draw on the device what can be drawn ahead of the commits, and bring all of it to the host in one transfer.

    The token cache learns in between, while the device computes. If the transfer fails, each sequence fetches its own
    tokens as it commits.
    """

    for each in scheduled:
        if each.draws:
            isolate_failure(each, each.begin)
    for each in scheduled:
        each.sequence.flush_to_cache()
    samplers = [each.sequence.sampler for each in scheduled if each.draws and each.error is None]
    try:
        fetch(samplers)
    except Exception as error:
        logger.warning("the draws of %d answers failed, each is tried alone: %s", len(samplers), error_location(error))


def isolate_failure(each: ScheduledSequence, action: Callable[[], Delta | None]) -> Delta | None:
    """Do `action` unless something went wrong in this sequence before; an exception is the sequence's alone.

    Raises `AcceleratorError`: a device that failed computes nothing more in this process.
    """
    if each.error is not None:
        return None
    try:
        return action()
    except AcceleratorError:
        raise
    except Exception as error:
        clear_frames(error.__traceback__)  # which hold what a failed forward had computed, while others are tried
        each.error = error
        return None
