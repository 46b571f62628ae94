"""Finds the backend that a model name, an alias or a strategy means."""

from __future__ import annotations

from collections.abc import Collection

from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError, ModelNotFoundError
from agentspec.reasoning.settings import StrategySettings
from agentspec.settings.load import Settings
from agentspec.settings.models import Aliases, model_names, named_model, passthrough, pool_specs, strategies_of


class ModelDirectory:
    """The model names of the settings and of `given` backends, which are ready ones of these names.

    A model is found as a pair: the name of its backend or pool, and that backend's own name for the model. Raises
    `ConfigurationError` for names that two backends claim, and for aliases that cannot work.
    """

    def __init__(self, settings: Settings, given: Collection[str]) -> None:
        self._settings = settings
        self._names = model_names(settings, given)
        self._passthrough = passthrough(settings, given)
        upstreams = (name for name, backend in settings.backends.items() if isinstance(backend, OpenAISettings))
        self._upstreams = {*upstreams, *pool_specs(settings)}
        self.aliases = Aliases(settings.model_aliases, self._names, any_target=self.takes_any_model)

    @property
    def names(self) -> list[str]:
        """The names that are known; a sole upstream accepts further ones."""
        return list(self._names)

    @property
    def takes_any_model(self) -> bool:
        """Whether requests for other names go to the sole upstream."""
        return self._passthrough is not None

    def find(self, model: str) -> tuple[str, str]:
        """The backend of a model, which is no alias. Raises `ModelNotFoundError` if it is unknown."""
        if model in self._names:
            return self._names[model]
        if self._passthrough is not None:
            return self._passthrough, self._settings.backends[self._passthrough].model or model
        known = ", ".join(repr(name) for name in (*self._names, *self.aliases)) or "none"
        raise ModelNotFoundError(f"no model {model!r} here; configured: {known}", param="model")

    def base_of(self, model: str) -> tuple[str, str]:
        """The backend of a plain model; of a strategy, that of its base model. Raises as `find` does."""
        strategy = self.strategy(model)
        return self.find(model) if strategy is None else named_model(self._settings, strategy.base)

    def strategy(self, model: str) -> StrategySettings | None:
        """The settings of the strategy that `model` names; None for a plain model."""
        settings = self._settings.models.get(model)
        return settings if isinstance(settings, StrategySettings) else None

    def is_upstream(self, backend: str) -> bool:
        """Whether a backend, or every member of a pool, is a server that is reached by HTTP."""
        return backend in self._upstreams

    def with_strategy(self, model: str, strategy: str | None) -> str:
        """The name of the model that answers for `model` by `strategy`, a name or a kind; "plain" is without one.

        `model` itself where its upstream, which may be another gateway, has to decide. Raises `InvalidRequestError` if
        no model of the settings has this strategy and the base of `model`, `ModelNotFoundError` as `find`.
        """
        if strategy is None:
            return model
        meant = self.aliases.meant(model)
        base = self.base_of(meant)
        kinds = self._kinds_on(base)
        named = [name for name, kind in kinds.items() if strategy in (name, kind)]
        if meant in named:
            return model
        if named:
            return named[0]
        if set(kinds.values()) <= {"plain"} and self.is_upstream(base[0]):
            return model
        known = ", ".join(sorted({kind if kind == "plain" else f"{kind} ({name})" for name, kind in kinds.items()}))
        raise InvalidRequestError(f"{model!r} has no strategy {strategy!r} here; there is {known}", param="strategy")

    def _kinds_on(self, base: tuple[str, str]) -> dict[str, str]:
        """The models that answer by `base`: the kind of each strategy, and "plain", by name."""
        kinds = strategies_of(self._settings, base)
        return kinds | {name: "plain" for name, meant in self._names.items() if meant == base and name not in kinds}
