"""A model with retrieval as a `Backend`: turns the events of an answer into deltas and counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.backends.base import Capabilities, tokenization_of
from agentspec.errors import ConfigurationError
from agentspec.protocol.speculation import RetrievalSpeculation
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.retrieval.ralmspec import (
    AnswerBegan,
    AnswerEnded,
    Event,
    SearchStats,
    VerifiedText,
    ralmspec,
    sequential,
)
from agentspec.reasoning.settings import RaLMSpecSettings
from agentspec.reasoning.strategy import Dependencies, ModelRef, Strategy, answers
from agentspec.speculation.stride import StrideMeasurements
from agentspec.types import Delta, GenerateRequest, Usage


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

    @property
    def roles(self) -> dict[str, ModelRef]:
        return {"base": self.base}

    async def prepare(self) -> list[str]:
        """Ask the model only: a knowledge base that is down now may be up at the first request.

        Raises `ConfigurationError` for a model that does not accept token ids.
        """
        if not await answers(self.base.backend):
            return ["base"]
        if tokenization_of(self.base.backend) is None:
            raise ConfigurationError(
                f"models.{self.name}.base: the model {self.base.model!r} takes no token ids, which retrieval needs:"
                " name a local model, or a vLLM server's"
            )
        return []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Yield verified text round by round; closing the iterator cancels the model's work and the searches.

        Raises `KnowledgeBaseError` if the knowledge base fails, `InvalidRequestError` for request fields that a model
        with retrieval cannot honour, and what the base model raises.
        """
        stats, tokens, parser = SearchStats(), 0, None
        async with aclosing(self._events(request, stats)) as events:
            async for event in events:
                if isinstance(event, AnswerBegan):
                    parser = None if event.reader is None else event.reader.parser()
                    continue
                if isinstance(event, VerifiedText):
                    tokens += len(event.token_ids)
                delta = self._delta(event, tokens, stats)
                yield delta if parser is None else parser.parse(delta)

    def _delta(self, event: VerifiedText | AnswerEnded, tokens: int, stats: SearchStats) -> Delta:
        """What the client gets of an event, after `tokens` in all."""
        if isinstance(event, VerifiedText):
            return Delta(text=event.text, token_ids=event.token_ids, logprobs=event.logprobs)
        return Delta(
            finish_reason=event.finish,
            stop_reason=event.stop_reason,
            usage=Usage(prompt_tokens=event.prompt_tokens, completion_tokens=tokens),
            speculation=self._summary(stats),
        )

    def _events(self, request: GenerateRequest, stats: SearchStats) -> AsyncGenerator[Event]:
        given: dict[str, Any] = {
            "backend": self.base.backend,
            "knowledge": self.knowledge,
            "document_tokens": self.settings.document_tokens,
            "stats": stats,
        }
        asked = replace(request, model=self.base.model)
        if not request.speculation:
            return sequential(asked, **given)
        return ralmspec(asked, **given, measured=self.measured)

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
            seconds=stats.seconds,
        )
