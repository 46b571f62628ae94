"""`[models.NAME]` tables: which names clients may ask for, and which backend or pool each of them means."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from agentspec.backends.settings import OpenAISettings, PoolSpec, PoolTarget
from agentspec.errors import ConfigurationError
from agentspec.placement import DEFAULT_POLICY
from agentspec.reasoning.settings import StrategySettings
from agentspec.settings_model import SettingsModel

if TYPE_CHECKING:
    from agentspec.backends.pool.fleet import Fleet
    from agentspec.settings.load import Settings


class ModelSettings(SettingsModel):
    """`[models.NAME]`: a name that clients may send as `model`, and the backend that answers."""

    backend: str | None = Field(default=None, description="Name of a [backends.NAME] table")
    upstream_model: str | None = Field(default=None, description="Model name sent to the backend; unset sends its own")
    backends: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="Instead of backend: several, of kind openai, that serve the model"
    )
    placement: Literal["round_robin", "least_loaded", "workflow"] = Field(
        default="workflow", description="Which of several servers takes a call: round_robin, least_loaded, workflow"
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The backends that serve it."""
        return self.backends or (self.backend or "",)

    @model_validator(mode="after")
    def _one_way_to_backends(self) -> Self:
        if (self.backend is None) == (self.backends is None):
            raise ValueError("set either backend (one) or backends (a list)")
        names = self.backends or ()
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"backends names {twice[0]!r} twice")
        return self


def model_names(settings: Settings, given: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """Model name -> (backend name, the backend's own name for the model). That of a strategy is its base model's."""
    names = {name: (name, name) for name in given if name not in settings.backends}
    for name, model in settings.models.items():
        if isinstance(model, StrategySettings):
            names[name] = _plain(settings, model.base)[0], name
        else:
            names[name] = _plain(settings, name)
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


def _plain(settings: Settings, name: str) -> tuple[str, str]:
    """The backend or pool of a plain model or of a backend, and its name for the model: `name` where none is set."""
    model = settings.models.get(name)
    if not isinstance(model, ModelSettings):
        return name, settings.backends[name].model or name
    backend = model_pool(name) if needs_pool(settings, model) else model.sources[0]
    return backend, model.upstream_model or settings.backends[model.sources[0]].model or name


def named_model(settings: Settings, name: str) -> tuple[str, str]:
    """The backend name and upstream model for `name` in a strategy's settings: a plain model or a backend.

    Raises `ConfigurationError` if no setting names the upstream model.
    """
    model = settings.models.get(name)
    sources = model.sources if isinstance(model, ModelSettings) else (name,)
    named = isinstance(model, ModelSettings) and model.upstream_model is not None
    for backend in sources:
        if not named and settings.backends[backend].model is None:
            raise ConfigurationError(f"{name!r} is used by a strategy: set backends.{backend}.model")
    return _plain(settings, name)


def unreachable(settings: Settings) -> dict[str, str]:
    """Maps each backend that no model name reaches to advice on what to change."""
    reached = {backend for backend, _ in model_names(settings).values()} | {passthrough(settings)}
    for model in settings.models.values():
        reached |= {*(model.models.values() if isinstance(model, StrategySettings) else model.sources)}
    further = "" if settings.models else " for each model, or set backends.{}.model"
    left = [name for name in settings.backends if name not in reached]
    return {name: f'add a [models.NAME] table with backend = "{name}"{further.format(name)}' for name in left}


def passthrough(settings: Settings, given: Collection[str] = ()) -> str | None:
    """The backend that accepts any model name: a sole upstream, unless the settings list model names."""
    only = list(dict.fromkeys([*settings.backends, *given]))
    if settings.models or len(only) != 1:
        return None
    configured = settings.backends.get(only[0])
    return only[0] if configured is not None and not configured.local else None


def model_pool(name: str) -> str:
    """The name of the pool of the model `name`, which no backend has."""
    return f"models.{name}"


def needs_pool(settings: Settings, model: ModelSettings) -> bool:
    """Whether calls of a model are placed: one backend with one address is asked as it is."""
    return model.backend is None or settings.backends[model.backend].has_several_servers


def pool_specs(settings: Settings) -> dict[str, PoolSpec]:
    """The pools of the models and backends that need one, by name. A backend's is asked for its own model, or else the
    client's.
    """
    models = {
        model_pool(name): _spec(settings, name, model)
        for name, model in settings.models.items()
        if isinstance(model, ModelSettings) and needs_pool(settings, model)
    }
    return models | {
        name: PoolSpec(name, (PoolTarget(name, backend.model),), DEFAULT_POLICY)
        for name, backend in settings.backends.items()
        if backend.has_several_servers
    }


def open_fleet(settings: Settings, backends: Mapping[str, object]) -> Fleet | None:
    """The pools of the settings, with the upstreams among `backends` that are built already; None if there is none."""
    specs = pool_specs(settings)
    if not specs:
        return None
    from agentspec.backends.openai.backend import OpenAIBackend
    from agentspec.backends.pool.fleet import Fleet

    upstreams = {name: one for name, one in settings.backends.items() if isinstance(one, OpenAISettings)}
    built = {name: one for name, one in backends.items() if isinstance(one, OpenAIBackend)}
    return Fleet(specs, upstreams, built, settings.fleet)


def _spec(settings: Settings, name: str, model: ModelSettings) -> PoolSpec:
    own = {backend: settings.backends[backend].model for backend in model.sources}
    targets = tuple(PoolTarget(backend, model.upstream_model or known or name) for backend, known in own.items())
    return PoolSpec(model_pool(name), targets, model.placement)
