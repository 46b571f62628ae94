"""Runs each request on the backend of its model; builds the backends and strategies, and closes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import anyio

from agentspec.backends.base import Backend, SharesCaches, is_local
from agentspec.backends.model_store import require_known
from agentspec.backends.settings import BackendSettings, EncoderSettings, OpenAISettings
from agentspec.errors import (
    AgentSpecError,
    ConfigurationError,
    NotReadyError,
    ShuttingDownError,
    extra_of,
    install_advice,
)
from agentspec.protocol.requests import with_extra
from agentspec.reasoning.settings import StrategySettings
from agentspec.runtime.model_directory import Aliases, ModelDirectory
from agentspec.settings.load import Settings
from agentspec.settings.models import named_model, open_fleet
from agentspec.settings.server import ServerSettings
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.backends.pool.backend import PoolBackend
    from agentspec.backends.pool.fleet import Fleet
    from agentspec.cache import SuffixCache
    from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
    from agentspec.reasoning.strategy import ModelRef, Strategy


MOST_ROUTES = 1024  # names whose routes are remembered: those that only the upstream knows are any number


@dataclass(frozen=True, slots=True)
class Route:
    """The backend that serves a model name, and the backend's own name for the model.

    `model` is the name in the settings that it stands for, None for one that only the upstream knows. `upstream`: the
    backend, or every server of the pool, is reached by HTTP.
    """

    backend_name: str
    backend: Backend
    upstream_model: str
    model: str | None = None
    upstream: bool = True


class Runtime:
    """One cache, one backend per `[backends.NAME]` table, and the model names that the backends serve.

    `backends` are ready backends: each replaces the configured backend of its name; a name that is not configured
    becomes a model name as well. Without `settings`, only these backends exist. `cache` is an open cache, which the
    caller closes; `knowledge` are open knowledge bases, which replace the configured ones of the same names. Nothing is
    built before `start()`. Thread-safe, except that `aclose` may only be called once no new request arrives.
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
        self.fleet: Fleet | None = None
        self._backends: dict[str, Backend] = dict(backends or {})
        self._pools: dict[str, PoolBackend] = {}
        self._directory = ModelDirectory(self.settings, self._backends)
        self._strategies: dict[str, Strategy[Any]] = {}
        self._routes: dict[str, Route] = {}
        self._knowledge = dict(knowledge or {})
        self._given_cache = cache
        self._own_cache: SuffixCache | None = None
        self._most_tokens: int | None = None
        self._building, self._opening = threading.Lock(), threading.Lock()
        self._started = False
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether every backend is built and the runtime accepts requests."""
        return self._started and not self._closed

    @property
    def failure(self) -> AgentSpecError | None:
        """Why a backend can serve no more requests until the process is started again; None if all can."""
        reporting = [backend for backend in self._backends.values() if is_local(backend, "failure")]
        return next((backend.failure for backend in reporting if backend.failure is not None), None)

    @property
    def cache(self) -> SuffixCache:
        """The token cache that all backends share, opened on first use. Raises `CacheError` if it cannot be opened."""
        if self._given_cache is not None:
            return self._given_cache
        with self._opening:
            if self._own_cache is None:
                self._own_cache = self.settings.cache.open()
            return self._own_cache

    def start(self) -> None:
        """Build the backends. Blocks until their models are loaded. Idempotent.

        Raises `ConfigurationError` or `ModelUnavailableError`. Backends built before the failure remain for the next
        call; `aclose` releases them.
        """
        with self._building:
            for name, settings in self.settings.backends.items():
                if self._closed:
                    raise ShuttingDownError("the runtime is closed")
                if name not in self._backends and not settings.has_several_servers:
                    self._backends[name] = _build_backend(name, settings, lambda: self.cache)
            self.fleet = self.fleet or open_fleet(self.settings, self._backends)
            self._pools = {} if self.fleet is None else self.fleet.backends
            sharing = [one for one in self._all() if isinstance(one, SharesCaches)]
            _keep_tenants_apart(sharing, self.settings.server)
            self._limit_upstreams()
            self._strategies = self._strategies or _build_strategies(self.settings, self._backend, self._knowledge)
            self._started = True

    async def start_for(self, model: str) -> None:
        """Call `start` in a thread unless it is done. Raises `ModelNotFoundError` first, and what `start` raises."""
        if not self.ready:
            self._directory.find(self.aliases.resolve(model))
            await anyio.to_thread.run_sync(self.start)

    def models(self) -> list[str]:
        """The model names that `route` knows; a sole upstream accepts further names."""
        return self._directory.names

    @property
    def aliases(self) -> Aliases:
        """Further names of the models."""
        return self._directory.aliases

    @property
    def takes_any_model(self) -> bool:
        """Whether requests for names that `models` does not list go to the sole upstream."""
        return self._directory.takes_any_model

    @property
    def keeps_index(self) -> bool:
        """Whether a local engine of this process keeps an index of tokens in `cache`."""
        return self.ready and any(backend.local for backend in self.settings.backends.values())

    def backends(self) -> dict[str, Backend]:
        """The backends and pools by name; empty before `start()`."""
        return {**self._backends, **self._pools} if self.ready else {}

    def route(self, model: str) -> Route:
        """The way to what answers for `model`. Raises `ModelNotFoundError`, and `NotReadyError` before `start()`."""
        if self.ready and (known := self._routes.get(model)):
            return known
        asked, model = model, self.aliases.resolve(model)
        backend_name, upstream_model = self._directory.find(model)
        if not self.ready:
            raise ShuttingDownError("the runtime is closed") if self._closed else NotReadyError("call start() first")
        backend = self._strategies.get(model) or self._backend(backend_name)
        upstream = model not in self._strategies and backend_name in self._directory.upstreams
        route = Route(backend_name, backend, upstream_model, model if model in self._directory else None, upstream)
        if len(self._routes) < MOST_ROUTES:
            self._routes[asked] = route
        return route

    def base_of(self, model: str) -> Route:
        """The route of a plain model; of a strategy, that of its base model. Raises as `route` does."""
        self.route(model)
        backend_name, upstream_model = self._directory.base_of(self.aliases.resolve(model))
        return Route(backend_name, self._backend(backend_name), upstream_model)

    def _backend(self, name: str) -> Backend:
        return self._pools.get(name) or self._backends[name]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Run `request` on the backend of its model, and start the runtime first if necessary.

        Closing the iterator cancels the request. Raises what `route`, `start` and the backend raise.
        """
        await self.start_for(request.model)
        async with aclosing(self.answer(request, self.route(request.model))) as answer:
            async for delta in answer:
                yield delta

    def answer(self, request: GenerateRequest, route: Route) -> AsyncGenerator[Delta]:
        """Run `request` by `route`, which its model has led to. Closing the iterator cancels it."""
        configured = self.settings.backends.get(route.backend_name)
        if configured is not None and configured.local:
            request = with_extra(request)
        request = replace(request, model=route.upstream_model, store=request.store and self.settings.cache.store)
        answer = cast("AsyncGenerator[Delta]", route.backend.generate(request))
        shown = request.include_reasoning and request.extra.get("include_reasoning") is not False
        return answer if shown else _without_reasoning(answer)

    async def aclose(self) -> None:
        """Cancel running requests, release the backends, then flush and close the cache. Idempotent."""
        await self.close_backends()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close_cache)

    async def close_backends(self) -> None:
        """The first half of `aclose`, for runtimes that share a cache. Idempotent."""
        self._closed = True  # a running start() stops after the backend that it is building
        with anyio.CancelScope(shield=True):
            while not self._building.acquire(blocking=False):
                await anyio.sleep(0.05)
            try:
                async with AsyncExitStack() as stack:
                    for one in (*self._all(), *self._knowledge.values()):
                        stack.push_async_callback(one.aclose)
            finally:
                self._building.release()

    def close_cache(self) -> None:
        """Flush and close the cache, unless the caller passed it or it was never opened. Blocks; idempotent."""
        if self._own_cache is not None:
            self._own_cache.close()

    async def __aenter__(self) -> Runtime:
        await anyio.to_thread.run_sync(self.start)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def limit_upstreams(self, max_tokens: int) -> None:
        """Let no answer that is generated here, also by strategies, ask an upstream for more than `max_tokens`."""
        self._most_tokens = max_tokens
        self._limit_upstreams()

    def _limit_upstreams(self) -> None:
        for backend in self._all():
            if self._most_tokens is not None and isinstance(backend, SharesCaches):
                backend.limit(self._most_tokens)

    def _all(self) -> list[Any]:
        """The backends, the servers of pools, and what looks after these."""
        fleet = self.fleet
        return [*self._backends.values(), *((fleet, *fleet.servers.values()) if fleet is not None else ())]


async def _without_reasoning(answer: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    async with aclosing(answer):
        async for delta in answer:
            yield delta.without_reasoning()


def _build_backend(name: str, settings: BackendSettings, open_cache: Callable[[], SuffixCache]) -> Backend:
    """The backend `name`, ready for requests. Blocks until its model is loaded.

    Only backends that draft call `open_cache`. Raises `ConfigurationError` for a package that is missing, and
    `ModelUnavailableError`.
    """
    if isinstance(settings, OpenAISettings):
        from agentspec.backends.openai import OpenAIBackend

        return OpenAIBackend(settings, name=name)
    require_known(settings.model)  # before torch is imported, which takes long
    try:
        if isinstance(settings, EncoderSettings):
            from agentspec.backends.torch.embeddings import SentenceEncoder

            return SentenceEncoder.load(settings.model, settings.device)
        from agentspec.backends.torch import TorchBackend
    except ModuleNotFoundError as error:
        if not extra_of(error.name, ["torch"]):
            raise
        advice = f"needs the package {error.name!r}; {install_advice('torch')}"
        raise ConfigurationError(f"backends.{name}, of kind {settings.kind!r}, {advice}") from error
    return TorchBackend.load(settings, cache=open_cache())


def _keep_tenants_apart(upstreams: Sequence[SharesCaches], settings: ServerSettings) -> None:
    """Give every upstream's backend the salts of the tenants: of several, each needs its own.

    Raises `ConfigurationError` if an upstream that answers cannot do it.
    """
    if not upstreams:
        return
    from agentspec.backends.openai.isolation import TenantIsolation

    isolation = TenantIsolation(settings.read_secret(), required=len(settings.tenant_names) > 1)
    for upstream in upstreams:
        upstream.isolate(isolation)

    async def check() -> None:
        for upstream in upstreams:
            await upstream.check_isolation()
            await upstream.leave_loop()

    if isolation.required:
        _run_on_own_loop(check)


def _build_strategies(
    settings: Settings, find_backend: Callable[[str], Backend], knowledge: dict[str, KnowledgeBase]
) -> dict[str, Strategy[Any]]:
    """The strategies of the settings, prepared, by model name. `find_backend` looks up the backends of their models.

    Knowledge bases that are not in `knowledge` are opened and added to it, each once for all strategies. Raises
    `ConfigurationError` for a model that cannot play its role.
    """
    wanted = {name: model for name, model in settings.models.items() if isinstance(model, StrategySettings)}
    if not wanted:
        return {}
    from agentspec.reasoning.strategy import Dependencies, ModelRef, open_strategy, prepare

    def find(name: str) -> ModelRef:
        backend_name, model = named_model(settings, name)
        return ModelRef(find_backend(backend_name), model)

    def knowledge_base(name: str) -> KnowledgeBase:
        if name not in knowledge:
            from agentspec.reasoning.retrieval.knowledge.folder import open_knowledge

            knowledge[name] = open_knowledge(settings.knowledge[name], name)
        return knowledge[name]

    dependencies = Dependencies(find, knowledge_base)
    built = {name: open_strategy(name, one, dependencies) for name, one in wanted.items()}

    async def prepare_all() -> None:
        for strategy in built.values():
            await prepare(strategy)

    _run_on_own_loop(prepare_all)
    return built


def _run_on_own_loop(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end on a new event loop, in a thread of its own: this one may have a loop that runs."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(make())).result()
