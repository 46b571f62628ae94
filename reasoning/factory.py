"""From settings and backends to a strategy that can run, or an error that says what to change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from agentspec.backends.base import Backend, Embeds
from agentspec.errors import AgentSpecError, ConfigurationError
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.delegation.model_role import ModelRole
from agentspec.reasoning.delegation.templates import Template
from agentspec.reasoning.delegation.trace import TraceFolder
from agentspec.reasoning.retrieval.backend import RetrievalBackend
from agentspec.reasoning.retrieval.knn.backend import KnnStrategy
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.settings import (
    AnyStrategy,
    Delegation,
    KnnLmSettings,
    LookaheadSettings,
    RaLMSpecSettings,
    SpecReasonSettings,
)
from agentspec.types import GenerateRequest, SamplingParams

PROBE_SECONDS = 10.0
_LONG = "One and one is two, and two and one is three. " * 4
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelRef:
    """What a name in a strategy's settings means: a backend, and the model's name there."""

    backend: Backend
    model: str


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What strategies are made of: `find` says what base, small and judge mean, `know` what a knowledge base's name."""

    find: Callable[[str], ModelRef]
    know: Callable[[str], KnowledgeBase]
    traces: TraceFolder | None = None


Strategy = DelegationBackend | RetrievalBackend | KnnStrategy


def open_strategy(name: str, settings: AnyStrategy, parts: Dependencies) -> Strategy:
    """The strategy of `[models.name]`. Raises `ConfigurationError`, and what opening a knowledge base raises."""
    if isinstance(settings, KnnLmSettings):
        base = parts.find(settings.base)
        return KnnStrategy(name, settings, base.backend, base.model)
    if isinstance(settings, RaLMSpecSettings):
        base = parts.find(settings.base)
        return RetrievalBackend(name, settings, base.backend, base.model, parts.know(settings.knowledge))
    return build(name, settings, parts.find, parts.traces)


def build(
    name: str, settings: Delegation, find: Callable[[str], ModelRef], traces: TraceFolder | None = None
) -> DelegationBackend:
    """The strategy of `[models.name]` that delegates, its templates read. Raises `ConfigurationError`."""
    writers = {role: _writer(role, settings, find) for role in ("base", "small")}
    if isinstance(settings, (SpecReasonSettings, LookaheadSettings)):
        writers["judge"] = _writer("judge", settings, find) if settings.judge else writers["base"]
    if isinstance(settings, LookaheadSettings) and settings.compare == "embedding":
        _require_embeddings(name, writers["judge"])
    return DelegationBackend(name, settings, writers, traces)


async def prepare(strategy: Strategy) -> list[str]:
    """Find out what the models of `strategy` can do. Gives the roles whose models do not answer now: those are left
    for the first request.

    To be run on a loop of its own: what was opened on it is closed. Raises `ConfigurationError` for a model that can
    neither continue a message nor be sent a prompt of ours.
    """
    try:
        if isinstance(strategy, KnnStrategy):
            await strategy.open()
            return []
        if isinstance(strategy, RetrievalBackend):
            return await _prepare_retrieval(strategy)
        return await _prepare(strategy)
    finally:
        for backend in _backends(strategy):
            leave: Any = getattr(backend, "leave_loop", None)
            if leave is not None:
                await leave()


def _backends(strategy: Strategy) -> list[Backend]:
    if isinstance(strategy, (RetrievalBackend, KnnStrategy)):
        return [strategy.base]
    return [writer.backend for writer in strategy.writers.values()]


async def _prepare_retrieval(strategy: RetrievalBackend) -> list[str]:
    """The knowledge base is not asked: one that is down now may be up for the first request."""
    if not await _answers(strategy.base):
        logger.warning("the base model of %s does not answer yet", strategy.name)
        return ["base"]
    strategy.check()
    return []


async def _prepare(strategy: DelegationBackend) -> list[str]:
    answers: dict[int, bool] = {}
    for role, writer in strategy.writers.items():
        if id(writer) not in answers:  # a judge may be the base model's
            answers[id(writer)] = await _probed(writer)
            if answers[id(writer)]:
                await _examine(writer, strategy.settings)
            else:
                logger.warning("the %s model of %s does not answer yet", role, strategy.name)
        if answers[id(writer)]:
            _require_logprobs(strategy, role, writer)
    return [role for role, writer in strategy.writers.items() if not answers[id(writer)]]


async def _examine(writer: ModelRole, settings: Delegation) -> None:
    await writer.check(settings.think_start)
    if writer.continues_messages:
        writer.keeps_thinking = await _keeps_thinking(writer, settings)


def _writer(role: str, settings: Delegation, find: Callable[[str], ModelRef]) -> ModelRole:
    named, template = find(getattr(settings, role)), getattr(settings, f"{role}_template")
    return ModelRole(role, named.backend, named.model, Template(template) if template else None)


async def _answers(backend: Backend) -> bool:
    """Whether the model answers; an endpoint's capabilities are found out on the way."""
    probe: Any = getattr(backend, "probe", None)
    return probe is None or bool((await probe(PROBE_SECONDS)).answers)


async def _probed(writer: ModelRole) -> bool:
    """Whether the model answers, if need be by completing raw text: one without a chat template refuses messages."""
    if await _answers(writer.backend):
        return True
    return writer.template is not None and await _completes(writer)


async def _completes(writer: ModelRole) -> bool:
    request = GenerateRequest(writer.model, text="One", sampling=SamplingParams(max_tokens=1), store=False)
    try:
        return bool([delta async for delta in writer.deltas(request, PROBE_SECONDS)])
    except AgentSpecError:
        return False


async def _keeps_thinking(writer: ModelRole, settings: Delegation) -> bool:
    """Whether the endpoint's template leaves closed thinking in a message it continues.

    Templates of reasoning models delete it; then a prompt is shorter with the closing mark than without.
    """
    start, end = settings.think_start, settings.think_end
    if not end:
        return True
    try:
        opened = await _prompt_tokens(writer, f"{start}{_LONG}\n\nHello")
        closed = await _prompt_tokens(writer, f"{start}{_LONG}\n{end}\n\nHello")
    except AgentSpecError:
        return True
    return closed >= opened


async def _prompt_tokens(writer: ModelRole, begun: str) -> int:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": begun}]
    request = GenerateRequest(writer.model, messages=messages, continue_final=True, store=False)
    request = replace(request, sampling=SamplingParams(max_tokens=1))
    counted = 0
    async for delta in writer.deltas(request, PROBE_SECONDS):
        counted = delta.usage.prompt_tokens if delta.usage is not None else counted
    return counted


def _require_logprobs(strategy: DelegationBackend, role: str, writer: ModelRole) -> None:
    settings = strategy.settings
    averages = isinstance(settings, SpecReasonSettings) and settings.score == "average" and role == "judge"
    if averages and not writer.backend.capabilities.logprobs:
        raise ConfigurationError(
            f'models.{strategy.name}.score = "average" needs log-probabilities, which the judge {writer.model!r} does'
            ' not give: use score = "greedy" or another judge'
        )


def _require_embeddings(name: str, judge: ModelRole) -> None:
    if not isinstance(judge.backend, Embeds):
        raise ConfigurationError(
            f'models.{name}.compare = "embedding" needs a judge whose endpoint embeds texts: set judge to a backend of'
            ' kind "openai", or compare to "judge"'
        )
