"""A model with retrieval as a `Backend`, which adds the counts of an answer to its last delta."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.backends.base import Capabilities, tokenization_of
from agentspec.errors import ConfigurationError
from agentspec.protocol.speculation import RetrievalSpeculation
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.retrieval.ralmspec import SearchStats, ralmspec, sequential
from agentspec.reasoning.settings import RaLMSpecSettings
from agentspec.reasoning.strategy import Dependencies, ModelRef, Strategy, answers
from agentspec.speculation.stride import StrideMeasurements
from agentspec.types import Delta, GenerateRequest


@dataclass(slots=True)
class RetrievalBackend(Strategy[RaLMSpecSettings]):
    """A model that reads a document of `knowledge` every few tokens. Its answers carry a `RetrievalSpeculation`.

    A request without `speculation` gets the same answer by sequential retrieval. Their owners close the model and the
    knowledge base.
    """

    name: str
    settings: RaLMSpecSettings
    base: ModelRef
    knowledge: KnowledgeBase
    measured: StrideMeasurements = field(default_factory=StrideMeasurements)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(token_ids=True, logprobs=self.base.backend.capabilities.logprobs, speculation=True)

    @classmethod
    def open(cls, name: str, settings: RaLMSpecSettings, dependencies: Dependencies) -> RetrievalBackend:
        return cls(name, settings, dependencies.find(settings.base), dependencies.find_knowledge(settings.knowledge))

    async def prepare(self) -> list[str]:
        """Ask the model only: a knowledge base that is down now may be up at the first request."""
        if not await answers(self.base.backend):
            return ["base"]
        if tokenization_of(self.base.backend) is None:
            raise ConfigurationError(
                f"models.{self.name}.base: the model {self.base.model!r} accepts no token ids, which retrieval needs:"
                " name a local model, or a vLLM server's"
            )
        return []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Yield verified text round by round; closing the iterator cancels the model's work and the searches.

        Raises `KnowledgeBaseError` if the knowledge base fails, `InvalidRequestError` for request fields that a model
        with retrieval cannot honour, and what the base model raises.
        """
        stats, asked = SearchStats(), replace(request, model=self.base.model)
        given: dict[str, Any] = {"backend": self.base.backend, "knowledge": self.knowledge, "stats": stats}
        given["document_tokens"] = self.settings.document_tokens
        answer = ralmspec(asked, **given, measured=self.measured) if request.speculation else sequential(asked, **given)
        async with aclosing(answer) as deltas:
            async for delta in deltas:
                ended = delta.finish_reason is not None
                yield replace(delta, speculation=self._summary(stats)) if ended else delta

    def _summary(self, stats: SearchStats) -> RetrievalSpeculation:
        return RetrievalSpeculation(
            drafted=stats.guessed_tokens + stats.dropped_tokens,
            accepted=stats.guessed_tokens,
            steps=stats.rounds,
            strategy=self.settings.strategy,
            knobs=self.settings.answer_settings,
            knowledge=self.settings.knowledge,
            queries=stats.queries,
            batches=stats.batches,
            hit_rate=stats.hit_rate,
            strides=tuple(stats.strides),
            redone=stats.redone,
            seconds={part: round(seconds, 6) for part, seconds in stats.seconds.items()},
        )
