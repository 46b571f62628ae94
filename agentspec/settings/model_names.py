"""Which names clients may ask for, and which backend each of them means."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from agentspec.errors import ConfigurationError
from agentspec.reasoning.settings import StrategySettings
from agentspec.settings.load import Settings
from agentspec.settings.models import ModelSettings
from agentspec.settings.pools import model_pool, needs_pool


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

    def meant(self, model: str) -> str:
        """The model that `model` stands for: itself if it is no alias."""
        if model in self._models:
            return model
        begins = (target for beginning, target in self._beginnings if model.startswith(beginning))
        return self._exact.get(model) or next(begins, model)


def model_names(settings: Settings, given: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """Model name -> (backend name, the backend's own name for the model)."""
    names = {name: (name, name) for name in given if name not in settings.backends}
    for name, model in settings.models.items():
        if isinstance(model, StrategySettings):
            names[name] = (_base_backend(settings, model), name)
            continue
        names[name] = _backend_of(settings, name, model)
    if settings.models:
        return names
    for name, backend in settings.backends.items():
        if backend.model is None:
            continue
        if backend.model in names:
            raise ConfigurationError(
                f"backends.{names[backend.model][0]} and backends.{name} both serve {backend.model!r}:"
                " give each a name of its own in a [models.NAME] table"
            )
        names[backend.model] = (name, backend.model)
    return names


def _base_backend(settings: Settings, strategy: StrategySettings) -> str:
    """The backend of a strategy's base model: it writes the answer, so its limits apply."""
    base = settings.models.get(strategy.base)
    return _backend_of(settings, strategy.base, base)[0] if isinstance(base, ModelSettings) else strategy.base


def _backend_of(settings: Settings, name: str, model: ModelSettings) -> tuple[str, str]:
    """The backend, or the pool, of a plain model, and its name for the model."""
    own = settings.backends[model.sources[0]].model
    backend = model_pool(name) if needs_pool(settings, model) else model.sources[0]
    return backend, model.upstream_model or own or name


def named_model(settings: Settings, name: str) -> tuple[str, str]:
    """The backend name and upstream model for `name` in a strategy's settings: a plain model or a backend.

    Raises `ConfigurationError` if no setting names the upstream model.
    """
    model = settings.models.get(name)
    sources = model.sources if isinstance(model, ModelSettings) else (name,)
    given = model.upstream_model if isinstance(model, ModelSettings) else None
    for backend_name in sources:
        if (given or settings.backends[backend_name].model) is None:
            raise ConfigurationError(f"{name!r} is used by a strategy: set backends.{backend_name}.model")
    upstream_model = given or settings.backends[sources[0]].model or ""
    return (_backend_of(settings, name, model)[0] if isinstance(model, ModelSettings) else name), upstream_model


def strategies_of(settings: Settings, base: tuple[str, str]) -> dict[str, str]:
    """The kind of each strategy whose base model is `base`, a backend and its name for the model, by its own name."""
    strategies = {name: model for name, model in settings.models.items() if isinstance(model, StrategySettings)}
    return {name: one.strategy for name, one in strategies.items() if named_model(settings, one.base) == base}


def unreachable(settings: Settings) -> dict[str, str]:
    """Maps each backend that no model name reaches to advice on what to change."""
    reached = {backend for backend, _ in model_names(settings).values()} | {passthrough(settings)}
    for model in settings.models.values():
        if isinstance(model, StrategySettings):
            reached |= set(model.models.values())
        else:
            reached |= {*model.sources, *model.fallback}
    return {name: _advice(name, settings) for name in settings.backends if name not in reached}


def _advice(name: str, settings: Settings) -> str:
    advice = f'add a [models.NAME] table with backend = "{name}"'
    return advice if settings.models else f"{advice} for each model, or set backends.{name}.model"


def passthrough(settings: Settings, given: Collection[str] = ()) -> str | None:
    """The backend that accepts any model name: a sole upstream, unless the settings list model names."""
    only = list(dict.fromkeys([*settings.backends, *given]))
    if settings.models or len(only) != 1:
        return None
    configured = settings.backends.get(only[0])
    return only[0] if configured is not None and not configured.local else None
