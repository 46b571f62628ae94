"""The interface of strategies. A strategy is a model made of other models and opened from a `[models.NAME]` table."""

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
    from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase

PROBE_SECONDS = 10.0
AnySettings = TypeVar("AnySettings", bound=StrategySettings)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelRef:
    """The model that a name in a strategy's settings refers to: a backend, and the model's name at that backend."""

    backend: Backend
    model: str


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a strategy is opened with: `find` looks up models by name, `find_knowledge` looks up knowledge bases."""

    find: Callable[[str], ModelRef]
    find_knowledge: Callable[[str], KnowledgeBase]


class Strategy(ABC, Generic[AnySettings]):
    """A `Backend` that answers with the models of other backends. It never closes these backends: their owners do."""

    name: str
    settings: AnySettings
    base: ModelRef

    @classmethod
    @abstractmethod
    def open(cls, name: str, settings: Any, dependencies: Dependencies) -> Self:
        """Open the strategy of `[models.name]`. Raises `ConfigurationError` and errors of opening a knowledge base."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @property
    def roles(self) -> Mapping[str, Any]:
        """The models by role, each with its `backend`. One model may play several roles."""
        return {"base": self.base}

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]: ...

    async def prepare(self) -> list[str]:
        """Find out what the models can do. Returns the roles whose models do not answer now; the first request will
        ask these models again. Raises `ConfigurationError` for a model that cannot play its role.
        """
        return []

    def response_headers(self, request: GenerateRequest) -> dict[str, str]:
        """Headers that tell the client which strategy answers, and whether the strategy may change the answer."""
        return strategy_headers(self.settings.summary, lossy=self.settings.lossy, speculation=request.speculation)

    async def aclose(self) -> None:
        """Does nothing: whoever built the models' backends closes them."""


def open_strategy(name: str, settings: StrategySettings, dependencies: Dependencies) -> Strategy[Any]:
    """Open the strategy of `[models.name]`. Raises as `Strategy.open` does."""
    strategy: type[Strategy[Any]] = imported(settings.implementation)
    return strategy.open(name, settings, dependencies)


def imported(path: str) -> Any:
    """What `path` names, as `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


async def prepare(strategy: Strategy[Any]) -> list[str]:
    """Run `Strategy.prepare` on an event loop of its own, then close the connections that it opened on that loop.

    Logs the models that do not answer, and returns their roles.
    """
    try:
        silent = await strategy.prepare()
    finally:
        for role in strategy.roles.values():
            leave: Any = getattr(role.backend, "leave_loop", None)
            if leave is not None:
                await leave()
    if silent:
        logger.warning("models of %s do not answer yet: %s", strategy.name, ", ".join(silent))
    return silent


async def answers(backend: Backend) -> bool:
    """Whether the backend answers a probe, which also finds out the capabilities of an endpoint."""
    probe: Any = getattr(backend, "probe", None)
    return probe is None or bool((await probe(PROBE_SECONDS)).answers)


def whole_text(delta: Delta) -> str:
    """The text of a delta, with what an endpoint's parser of thoughts has sent as reasoning instead of content."""
    thought = delta.extra.get("reasoning_content") or delta.extra.get("reasoning")
    return (thought if isinstance(thought, str) else "") + delta.text
