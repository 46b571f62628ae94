"""The wiring: builds the cache and the backends that the settings name, and runs one request on the right one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from agentspec.backends.base import Backend, closing_items
from agentspec.backends.settings import BackendSettings, OpenAISettings
from agentspec.errors import (
    ConfigurationError,
    ModelNotFoundError,
    NotReadyError,
    ShuttingDownError,
)
from agentspec.protocol.requests import with_extra
from agentspec.reasoning.settings import StrategySettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache
    from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
    from agentspec.reasoning.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Route:
    """Where a model name leads: a backend and the name that the backend itself knows the model by."""

    backend_name: str
    backend: Backend
    upstream_model: str


class Runtime:
    """One cache and one backend per `[backends.NAME]` table, and the model names that lead to them.

    `backends` gives ready ones: each replaces the configured backend of its name, and a name that is not configured is
    a model name as well. Without `settings` the given ones are all there is. `cache` gives an open cache, which stays
    its owner's to close; `knowledge` open knowledge bases in place of the configured ones of their names. Nothing is
    built before `start()`. Thread-safe, except that `aclose` is called once nothing new arrives.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        backends: Mapping[str, Backend] | None = None,
        cache: SuffixCache | None = None,
        knowledge: Mapping[str, KnowledgeBase] | None = None,
    ) -> None:
        self.settings = settings or (Settings(backends={}) if backends else Settings())
        self._backends: dict[str, Backend] = dict(backends or {})
        self._names = _model_names(self.settings, self._backends)
        self._passthrough = _passthrough(self.settings, self._backends)
        self._strategies: dict[str, Strategy[Any]] = {}
        self._knowledge: dict[str, KnowledgeBase] = dict(knowledge or {})
        self._given_cache = cache
        self._own_cache: SuffixCache | None = None
        self._building = threading.Lock()
        self._opening = threading.Lock()
        self._started = False
        self._closed = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Runtime:
        """A runtime that builds everything `settings` names."""
        return cls(settings)

    @property
    def ready(self) -> bool:
        """Whether every backend is built and requests are taken."""
        return self._started and not self._closed

    @property
    def cache(self) -> SuffixCache:
        """The token memory that all backends share, opened on first use. Raises `CacheError`s if it cannot be."""
        if self._given_cache is not None:
            return self._given_cache
        with self._opening:
            if self._own_cache is None:
                self._own_cache = self.settings.cache.open()
            return self._own_cache

    def start(self) -> None:
        """Build the backends: blocks for as long as their models take to load. Idempotent.

        Raises `ConfigurationError` or `ModelUnavailableError`; what was built before the failure is kept for the next
        try and released by `aclose`.
        """
        with self._building:
            for name, settings in self.settings.backends.items():
                if self._closed:
                    raise ShuttingDownError("the runtime is closed")
                if name not in self._backends:
                    self._backends[name] = self._build(name, settings)
            self._build_strategies()
            self._started = True

    async def start_for(self, model: str) -> None:
        """`start` in a thread unless that was done. Raises `ModelNotFoundError` before it, and what `start` raises."""
        self._resolve(model)
        if not self.ready:
            await anyio.to_thread.run_sync(self.start)

    def models(self) -> list[str]:
        """The model names that `route` knows; a sole upstream takes further ones."""
        return list(self._names)

    @property
    def takes_any_model(self) -> bool:
        """Whether names that `models` does not list lead to the sole upstream."""
        return self._passthrough is not None

    def backends(self) -> dict[str, Backend]:
        """The backends by name; none before `start()`."""
        return dict(self._backends) if self.ready else {}

    def route(self, model: str) -> Route:
        """Where `model` leads. Raises `ModelNotFoundError` for an unknown name, `NotReadyError` before `start()`."""
        backend_name, upstream_model = self._resolve(model)
        if not self.ready:
            raise ShuttingDownError("the runtime is closed") if self._closed else NotReadyError("call start() first")
        if model in self._strategies:
            return Route(backend_name, self._strategies[model], upstream_model)
        return Route(backend_name, self._backends[backend_name], upstream_model)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Run `request` on the backend its model leads to, starting the runtime if need be.

        Closing the iterator cancels the work. Raises what `route`, `start` and the backend raise.
        """
        await self.start_for(request.model)
        route = self.route(request.model)
        configured = self.settings.backends.get(route.backend_name)
        if configured is not None and configured.local:
            request = with_extra(request)
        store = request.store and self.settings.cache.store
        answer = route.backend.generate(replace(request, model=route.upstream_model, store=store))
        async with closing_items(answer):
            async for delta in answer:
                yield delta

    async def aclose(self) -> None:
        """Cancel what runs, release the backends, then flush and close the cache. Idempotent."""
        await self.close_backends()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close_cache)

    async def close_backends(self) -> None:
        """The first half of `aclose`, for runtimes that share a cache. Idempotent."""
        self._closed = True  # a start() under way stops after the backend it is building
        with anyio.CancelScope(shield=True):
            while not self._building.acquire(blocking=False):
                await anyio.sleep(0.05)
            try:
                async with AsyncExitStack() as stack:
                    for backend in self._backends.values():
                        stack.push_async_callback(backend.aclose)
                    for base in self._knowledge.values():
                        stack.push_async_callback(base.aclose)
            finally:
                self._building.release()

    def close_cache(self) -> None:
        """Flush and close the cache, unless it was given or never opened. Blocks; idempotent."""
        if self._own_cache is not None:
            self._own_cache.close()

    async def __aenter__(self) -> Runtime:
        await anyio.to_thread.run_sync(self.start)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def _build(self, name: str, settings: BackendSettings) -> Backend:
        if isinstance(settings, OpenAISettings):
            from agentspec.backends.openai import OpenAIBackend

            return OpenAIBackend(settings)
        try:
            from agentspec.backends.torch import TorchBackend
        except ModuleNotFoundError as error:
            advice = f'needs the package {error.name!r}: pip install "agentspec[torch]"'
            raise ConfigurationError(f"backends.{name}, of kind {settings.kind!r}, {advice}") from error
        return TorchBackend.load(settings, cache=self.cache)

    def _build_strategies(self) -> None:
        wanted = {name: model for name, model in self.settings.models.items() if isinstance(model, StrategySettings)}
        if not wanted or self._strategies:
            return
        from agentspec.reasoning.delegation.trace import open_folder
        from agentspec.reasoning.strategy import Dependencies, ModelRef, open_strategy, prepare

        def find(name: str) -> ModelRef:
            backend_name, model = named_model(self.settings, name)
            return ModelRef(self._backends[backend_name], model)

        dependencies = Dependencies(find, self._knowledge_base, open_folder(self.settings.traces))
        built = {name: open_strategy(name, settings, dependencies) for name, settings in wanted.items()}

        async def prepare_all() -> None:
            for strategy in built.values():
                await prepare(strategy)

        _run_apart(prepare_all)
        self._strategies = built

    def _knowledge_base(self, name: str) -> KnowledgeBase:
        """The knowledge base of `[knowledge.name]`, opened once for all strategies."""
        if name not in self._knowledge:
            from agentspec.reasoning.retrieval.knowledge.factory import open_knowledge

            self._knowledge[name] = open_knowledge(self.settings.knowledge[name])
        return self._knowledge[name]

    def _resolve(self, model: str) -> tuple[str, str]:
        if model in self._names:
            return self._names[model]
        if self._passthrough is not None:
            return self._passthrough, self.settings.backends[self._passthrough].model or model
        known = ", ".join(repr(name) for name in self._names) or "none"
        raise ModelNotFoundError(f"no model {model!r} here; configured: {known}", param="model")


def _model_names(settings: Settings, given: Mapping[str, Backend]) -> dict[str, tuple[str, str]]:
    """Model name -> (backend name, the backend's own name for the model)."""
    names = {name: (name, name) for name in given if name not in settings.backends}
    for name, model in settings.models.items():
        if isinstance(model, StrategySettings):
            names[name] = (_base_backend(settings, model), name)
            continue
        own = settings.backends[model.backend].model
        names[name] = (model.backend, model.upstream_model or own or name)
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
    """The backend of a strategy's base model, which answers and whose limits therefore hold."""
    base = settings.models.get(strategy.base)
    return base.backend if isinstance(base, ModelSettings) else strategy.base


def _run_apart(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end on a loop of its own, from a thread that may have one already."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(make())).result()


def named_model(settings: Settings, name: str) -> tuple[str, str]:
    """The backend and its model that a strategy means by `name`: a plain model's, or a backend's own.

    Raises `ConfigurationError` where no setting names that model.
    """
    model = settings.models.get(name)
    backend_name = model.backend if isinstance(model, ModelSettings) else name
    own = settings.backends[backend_name].model
    upstream_model = (model.upstream_model if isinstance(model, ModelSettings) else None) or own
    if upstream_model is None:
        raise ConfigurationError(f"{name!r} is used by a strategy: set backends.{backend_name}.model")
    return backend_name, upstream_model


def unreachable(settings: Settings) -> dict[str, str]:
    """The backends that no model name leads to, each with what to change."""
    reached = {backend for backend, _ in _model_names(settings, {}).values()} | {_passthrough(settings, {})}
    for strategy in settings.models.values():
        if isinstance(strategy, StrategySettings):
            reached |= set(strategy.models.values())
    return {name: _advice(name, settings) for name in settings.backends if name not in reached}


def _advice(name: str, settings: Settings) -> str:
    advice = f'add a [models.NAME] table with backend = "{name}"'
    return advice if settings.models else f"{advice} for each model, or set backends.{name}.model"


def _passthrough(settings: Settings, given: Mapping[str, Backend]) -> str | None:
    """The backend that takes any model name: a sole upstream, as long as nobody listed the names that exist."""
    only = list({**settings.backends, **given})
    if settings.models or len(only) != 1:
        return None
    configured = settings.backends.get(only[0])
    return only[0] if configured is not None and not configured.local else None
