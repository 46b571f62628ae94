"""One step of the engine: propose drafts, run one forward for all scheduled sequences, draw tokens and commit them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter

from agentspec.backends.torch.drafters.base import draft_together
from agentspec.backends.torch.engine.scheduler import Schedule, ScheduledSequence, kv_length
from agentspec.backends.torch.engine.sequence import EngineContext, Sequence
from agentspec.backends.torch.engine.speculator import StepEstimate, depth_first, subtree
from agentspec.backends.torch.model.device import is_device_error, synchronize
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.sampler import fetch
from agentspec.speculation.governor import Governor
from agentspec.telemetry.safe_errors import error_location
from agentspec.types import Delta

logger = logging.getLogger(__name__)

Outcome = Delta | Exception | None


def run_step(schedule: Schedule, context: EngineContext) -> list[tuple[Sequence, Outcome]]:
    """Run one step and return each sequence's outcome: a delta, None while it reads its prompt, or its own error."""
    outcomes: list[tuple[Sequence, Outcome]] = [(sequence, score(sequence)) for sequence in schedule.scoring]
    outcomes += schedule.failed
    scheduled, device = schedule.scheduled, context.target.device
    if not scheduled:
        return outcomes
    drawing = [each for each in scheduled if each.draws]
    context.drawing = len(drawing)
    propose(drawing)
    cost = allocate_draft_budget(scheduled, context.governor)
    synchronize(device)  # else this step would be charged for KV slots that an earlier step is still moving
    tokens, past, started = sum(len(each.batch_item) for each in scheduled), kv_length(scheduled), perf_counter()
    batched = run(scheduled, context)
    if not any(each.draws for each in scheduled):
        synchronize(device)  # without a draw nothing waits for the forward, and the step would seem to cost nothing
    draw(scheduled)
    context.counters.batch_sizes[len(scheduled)] += 1
    context.counters.step_drafts[sum(len(each.proposal) for each in scheduled)] += 1
    deltas = [isolate_failure(each, partial(each.commit, cost)) for each in scheduled]
    if batched:  # the time includes sampling, which on a CUDA device is what waits for the forward
        context.governor.cost.observe(tokens, past, perf_counter() - started, len(scheduled))
    outcomes += [(each.sequence, each.error or delta) for each, delta in zip(scheduled, deltas, strict=True)]
    return outcomes


def propose(scheduled: list[ScheduledSequence]) -> None:
    """Let all answers draft; those with a draft model share its forwards."""
    proposals = draft_together([each.sequence.proposing() for each in scheduled])
    for each, proposal in zip(scheduled, proposals, strict=True):
        if isinstance(proposal, Exception):
            each.fail(proposal)
        else:
            each.proposal = proposal


def score(sequence: Sequence) -> Exception | None:
    """Score the next chunk of a prompt in a forward of its own, since the logits of all its tokens are needed."""
    try:
        if sequence.scorer:
            sequence.scorer.step(sequence.kv_cache)
    except Exception as error:
        if is_device_error(error):
            raise
        return error
    return None


def allocate_draft_budget(scheduled: list[ScheduledSequence], governor: Governor) -> StepEstimate:
    """Trim all proposals to the nodes that pay for the step as a whole, and estimate what the step costs."""
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
    """Run the forward and return whether all sequences shared one. If it fails, run each sequence alone, so that only
    those that fail again get an error.
    """
    sound = [each for each in scheduled if each.error is None]
    if not sound:
        return False
    if not run_together(sound, context.target):
        context.free_memory()  # only now: until here the exception kept the forward's tensors alive
        for each in sound:
            isolate_failure(each, partial(run_forward, [each], context.target))
        return False
    return len(sound) == len(scheduled) and (len(scheduled) == 1 or context.target.batched)


def run_together(scheduled: list[ScheduledSequence], target: TargetModel) -> bool:
    try:
        run_forward(scheduled, target)
    except Exception as error:
        if is_device_error(error):
            raise
        logger.warning("a step of %d answers failed, each is tried alone: %s", len(scheduled), error_location(error))
        return False
    return True


def run_forward(scheduled: list[ScheduledSequence], target: TargetModel) -> None:
    """Compute the logits of all sequences in one forward and, if one of them is judged by them, the hidden states."""
    items = [each.batch_item for each in scheduled]
    if any(each.draws and each.sequence.needs_states for each in scheduled):
        for each, (logits, states) in zip(scheduled, target.forward_batch_with_states(items), strict=True):
            each.logits, each.states = logits, states
        return
    for each, logits in zip(scheduled, target.forward_batch(items), strict=True):
        each.logits = logits


def draw(scheduled: list[ScheduledSequence]) -> None:
    """Draw all tokens that can be drawn before the commits on the device, and transfer them to the host at once.

    In between, while the device computes, the token cache learns. If the transfer fails, each sequence fetches its own
    tokens when it commits.
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
        if is_device_error(error):
            raise
        logger.warning("the draws of %d answers failed, each is tried alone: %s", len(samplers), error_location(error))


def isolate_failure(each: ScheduledSequence, action: Callable[[], Delta | None]) -> Delta | None:
    """Run `action` unless this sequence has failed before; store an exception in `each.error` instead of raising it.

    Raises errors of the device only: after them nothing more can be computed in this process.
    """
    if each.error is not None:
        return None
    try:
        return action()
    except Exception as error:
        if is_device_error(error):
            raise
        each.fail(error)
        return None
