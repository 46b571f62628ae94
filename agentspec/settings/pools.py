"""Which pools the settings describe: a model's, or a backend's that has several servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from agentspec.backends.pool.settings import PoolSpec, PoolTarget
from agentspec.backends.settings import OpenAISettings
from agentspec.placement import DEFAULT_POLICY
from agentspec.settings.models import ModelSettings

if TYPE_CHECKING:
    from agentspec.backends.pool.fleet import Fleet
    from agentspec.settings.load import Settings


def model_pool(name: str) -> str:
    """The name of the pool of the model `name`, which no backend has."""
    return f"models.{name}"


def needs_pool(settings: Settings, model: ModelSettings) -> bool:
    """Whether calls of a model are placed: one backend with one address is asked as it is."""
    return model.backend is None or bool(model.fallback) or settings.backends[model.backend].has_several_servers


def pool_specs(settings: Settings) -> dict[str, PoolSpec]:
    """Every pool, by name: those of models and backends that need one, and those that others fall back on."""
    specs: dict[str, PoolSpec] = {}
    plain = dict(_plain_models(settings))
    wanted = [model_pool(name) for name, model in plain.items() if needs_pool(settings, model)]
    wanted += [name for name, backend in settings.backends.items() if backend.has_several_servers]
    while wanted:
        name = wanted.pop(0)
        if name not in specs:
            specs[name] = _spec(settings, name, plain)
            wanted += specs[name].fallback
    return specs


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


def fallback_cycle(settings: Settings) -> list[str] | None:
    """The names of models that fall back on one another in a circle, the first one twice; None if there is none."""
    plain = dict(_plain_models(settings))

    def walk(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        following = plain[name].fallback if name in plain else ()
        return next((found for other in following if (found := walk(other, [*path, name]))), None)

    return next((found for name in plain if (found := walk(name, []))), None)


def _plain_models(settings: Settings) -> Iterator[tuple[str, ModelSettings]]:
    return ((name, model) for name, model in settings.models.items() if isinstance(model, ModelSettings))


def _spec(settings: Settings, pool: str, plain: dict[str, ModelSettings]) -> PoolSpec:
    """The pool of a model, or of a backend, which is asked for its own model or else the client's."""
    models = {model_pool(name): name for name in plain}
    if pool not in models:
        return PoolSpec(pool, (PoolTarget(pool, settings.backends[pool].model),), DEFAULT_POLICY)
    name = models[pool]
    model = plain[name]
    own = {backend: settings.backends[backend].model for backend in model.sources}
    targets = tuple(PoolTarget(backend, model.upstream_model or known or name) for backend, known in own.items())
    fallback = tuple(model_pool(other) if other in plain else other for other in model.fallback)
    return PoolSpec(pool, targets, model.placement, fallback)
