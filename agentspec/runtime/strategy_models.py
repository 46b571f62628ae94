"""The models that are strategies: made of other models, and of the knowledge bases that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentspec.backends.base import Backend
from agentspec.reasoning.settings import StrategySettings
from agentspec.runtime.own_loop import run_on_own_loop
from agentspec.settings.load import Settings
from agentspec.settings.models import named_model

if TYPE_CHECKING:
    from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
    from agentspec.reasoning.strategy import ModelRef, Strategy


class StrategyModels:
    """The strategies of the settings by model name; none before `build`. `knowledge` holds the open knowledge bases.

    `given` knowledge bases replace the configured ones of the same names.
    """

    def __init__(self, settings: Settings, given: Mapping[str, KnowledgeBase]) -> None:
        self._settings = settings
        self._strategies: dict[str, Strategy[Any]] = {}
        self.knowledge = dict(given)

    def get(self, model: str) -> Backend | None:
        """The strategy that answers for `model`; None if it is a plain model."""
        return self._strategies.get(model)

    def build(self, find_backend: Callable[[str], Backend]) -> None:
        """Open and prepare the strategies, unless that is done. `find_backend` looks up the backends of their models.

        Raises `ConfigurationError` for a model that cannot play its role.
        """
        models = self._settings.models
        wanted = {name: model for name, model in models.items() if isinstance(model, StrategySettings)}
        if not wanted or self._strategies:
            return
        from agentspec.reasoning.delegation.trace import open_folder
        from agentspec.reasoning.strategy import Dependencies, ModelRef, open_strategy, prepare

        def find(name: str) -> ModelRef:
            backend_name, model = named_model(self._settings, name)
            return ModelRef(find_backend(backend_name), model)

        dependencies = Dependencies(find, self._knowledge_base, open_folder(self._settings.traces))
        built = {name: open_strategy(name, settings, dependencies) for name, settings in wanted.items()}

        async def prepare_all() -> None:
            for strategy in built.values():
                await prepare(strategy)

        run_on_own_loop(prepare_all)
        self._strategies = built

    def _knowledge_base(self, name: str) -> KnowledgeBase:
        """The knowledge base of `[knowledge.name]`, opened once for all strategies."""
        if name not in self.knowledge:
            from agentspec.reasoning.retrieval.knowledge.folder import open_knowledge

            self.knowledge[name] = open_knowledge(self._settings.knowledge[name], name)
        return self.knowledge[name]
