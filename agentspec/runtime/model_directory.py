"""Which backend or pool the name of a model means, by the settings; aliases; the models that answer by a strategy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError, ModelNotFoundError
from agentspec.reasoning.settings import StrategySettings
from agentspec.settings.load import Settings
from agentspec.settings.models import model_names, named_model, passthrough, pool_specs


class Aliases:
    """Further names of models: names that clients have built in, and beginnings of such names (`claude-*`).

    Raises `ConfigurationError` for an alias that hides a model's own name, or whose target is none of `models`, unless
    `any_target` may be one.
    """

    def __init__(self, given: Mapping[str, str], models: Collection[str], *, any_target: bool) -> None:
        for alias, target in given.items():
            if alias in models:
                raise ConfigurationError(f"model_aliases.{alias} is the name of a model already")
            if target not in models and not any_target:
                known = ", ".join(map(repr, models)) or "none"
                raise ConfigurationError(f"model_aliases.{alias} = {target!r} names no model; configured: {known}")
        self._models, self._exact = models, {name: to for name, to in given.items() if not name.endswith("*")}
        beginnings = ((name[:-1], to) for name, to in given.items() if name.endswith("*"))
        self._beginnings = sorted(beginnings, key=lambda one: -len(one[0]))  # the longest that fits counts

    def __iter__(self) -> Iterator[str]:
        """The aliases that are whole names."""
        return iter(self._exact)

    def resolve(self, model: str) -> str:
        """The model that `model` stands for: itself if it is no alias."""
        if model in self._models:
            return model
        begins = (target for beginning, target in self._beginnings if model.startswith(beginning))
        return self._exact.get(model) or next(begins, model)


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
        self.upstreams = {*upstreams, *pool_specs(settings)}  # backends and pools that are reached by HTTP
        self.aliases = Aliases(settings.model_aliases, self._names, any_target=self.takes_any_model)

    @property
    def names(self) -> list[str]:
        """The names that are known; a sole upstream accepts further ones."""
        return list(self._names)

    def __contains__(self, model: str) -> bool:
        return model in self._names

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
        settings = self._settings.models.get(model)
        return (
            named_model(self._settings, settings.base) if isinstance(settings, StrategySettings) else self.find(model)
        )
