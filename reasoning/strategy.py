"""What a strategy is: a model made of other models, opened from its `[models.NAME]` table."""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from agentspec.backends.base import Backend, Capabilities
from agentspec.protocol.headers import strategy_headers
from agentspec.reasoning.settings import StrategySettings
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.reasoning.delegation.trace import TraceFolder
    from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase

PROBE_SECONDS = 10.0
AnySettings = TypeVar("AnySettings", bound=StrategySettings)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelRef:
    """What a name in a strategy's settings means: a backend, and the model's name there."""

    backend: Backend
    model: str


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What strategies are made of: `find` looks up the models they name, `find_knowledge` the knowledge bases."""

    find: Callable[[str], ModelRef]
    find_knowledge: Callable[[str], KnowledgeBase]
    traces: TraceFolder | None = None


class Strategy(ABC, Generic[AnySettings]):
    """A `Backend` that answers with the models of other backends, which stay their owners' to close."""

    name: str
    settings: AnySettings

    @classmethod
    @abstractmethod
    def open(cls, name: str, settings: Any, dependencies: Dependencies) -> Self:
        """The strategy of `[models.name]`. Raises `ConfigurationError`, and what opening a knowledge base raises."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, Any]:
        """The models by their roles, each with its `backend`; one may have several."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]: ...

    @abstractmethod
    async def prepare(self) -> list[str]:
        """Find out what the models can do. Gives the roles whose models do not answer now: those are left for the
        first request. Raises `ConfigurationError` for a model that cannot play its role.
        """

    async def inspect(self) -> list[str]:
        """As `prepare`, where models that would run here may be stand-ins without weights."""
        return await self.prepare()

    @abstractmethod
    def describe(self, role: str) -> str:
        """How the model in `role` is used, in words. For after `inspect`."""

    def response_headers(self, request: GenerateRequest) -> dict[str, str]:
        """Those that show a client that a strategy answers, and whether that may change the answer."""
        return strategy_headers(self.settings.summary, lossy=self.settings.lossy, speculation=request.speculation)

    async def aclose(self) -> None:
        """The models behind are closed by who built them."""


def open_strategy(name: str, settings: StrategySettings, dependencies: Dependencies) -> Strategy[Any]:
    """The strategy of `[models.name]`. Raises as `Strategy.open` does."""
    module, _, kind = settings.implementation.partition(":")
    strategy: type[Strategy[Any]] = getattr(importlib.import_module(module), kind)
    return strategy.open(name, settings, dependencies)


async def prepare(strategy: Strategy[Any]) -> list[str]:
    """`Strategy.prepare` on a loop of its own: connections opened on it are closed. Models that do not answer are
    logged.
    """
    try:
        silent = await strategy.prepare()
    finally:
        for role in strategy.roles.values():
            leave: Any = getattr(role.backend, "leave_loop", None)
            if leave is not None:
                await leave()
    distinct: dict[int, str] = {}  # a judge may be the base model
    for role_name in silent:
        distinct.setdefault(id(strategy.roles[role_name]), role_name)
    for role_name in distinct.values():
        logger.warning("the %s model of %s does not answer yet", role_name, strategy.name)
    return silent


async def answers(backend: Backend) -> bool:
    """Whether the model answers; an endpoint's capabilities are found out on the way."""
    probe: Any = getattr(backend, "probe", None)
    return probe is None or bool((await probe(PROBE_SECONDS)).answers)
