"""Builds the cache and the backends that the settings name, and runs each request on the backend of its model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from agentspec.backends.base import Backend, ReportsHealth, SharesCaches, TakesLimits, closing_items
from agentspec.backends.settings import BackendSettings, EncoderSettings, OpenAISettings
from agentspec.errors import (
    AgentSpecError,
    ConfigurationError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    ShuttingDownError,
)
from agentspec.protocol.requests import with_deadline, with_extra
from agentspec.reasoning.settings import StrategySettings
from agentspec.settings.load import Settings
from agentspec.settings.model_names import Aliases, model_names, named_model, passthrough, strategies_of
from agentspec.settings.pools import open_fleet
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.backends.openai.isolation import TenantIsolation
    from agentspec.backends.pool.backend import PoolBackend
    from agentspec.backends.pool.fleet import Fleet
    from agentspec.cache import SuffixCache
    from agentspec.cache.responses import KeepsResponses
    from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
    from agentspec.reasoning.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Route:
    """The backend that serves a model name, and the backend's own name for the model."""

    backend_name: str
    backend: Backend
    upstream_model: str


class Runtime:
    """One cache, one backend per `[backends.NAME]` table, and the model names that the backends serve.

    `backends` are ready backends: each replaces the configured backend of its name; a name that is not configured
    becomes a model name as well. Without `settings`, only these backends exist. `cache` is an open cache, which the
    caller closes; `knowledge` are open knowledge bases, which replace the configured ones of the same names. With
    `local` false another process answers for local backends and strategies, and none of them is built here;
    `responses` then is the store of stored responses, in place of the cache's. Nothing is
    built before `start()`. Thread-safe, except that `aclose` may only be called once no new request arrives.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        backends: Mapping[str, Backend] | None = None,
        cache: SuffixCache | None = None,
        knowledge: Mapping[str, KnowledgeBase] | None = None,
        local: bool = True,
        responses: KeepsResponses | None = None,
    ) -> None:
        self.settings = settings or (Settings(backends={}) if backends else Settings())
        self._backends: dict[str, Backend] = dict(backends or {})
        self._names = model_names(self.settings, self._backends)
        self._passthrough = passthrough(self.settings, self._backends)
        self.aliases = Aliases(self.settings.model_aliases, self._names, any_target=self._passthrough is not None)
        self._isolation: TenantIsolation | None = None
        self._most_tokens: int | None = None
        self._tenants = self.settings.server.tenant_names
        self._strategies: dict[str, Strategy[Any]] = {}
        self._pools: dict[str, PoolBackend] = {}
        self.fleet: Fleet | None = None
        self._knowledge: dict[str, KnowledgeBase] = dict(knowledge or {})
        self._given_cache = cache
        self._local = local
        self._responses = responses
        self._own_cache: SuffixCache | None = None
        self._building = threading.Lock()
        self._opening = threading.Lock()
        self._joining = threading.Lock()
        self._started = False
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether every backend is built and the runtime accepts requests."""
        return self._started and not self._closed

    @property
    def failure(self) -> AgentSpecError | None:
        """Why a backend can serve no more requests until the process is started again; None if all can."""
        reporting = [backend for backend in self._backends.values() if isinstance(backend, ReportsHealth)]
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

    @property
    def responses(self) -> KeepsResponses:
        """The stored answers of the Responses API. Raises `CacheError` if the cache cannot be opened."""
        return self.cache.responses if self._responses is None else self._responses

    def start(self) -> None:
        """Build the backends. Blocks until their models are loaded. Idempotent.

        Raises `ConfigurationError` or `ModelUnavailableError`. Backends built before the failure are kept for the next
        call; `aclose` releases them.
        """
        with self._building:
            for name, settings in self.settings.backends.items():
                if self._closed:
                    raise ShuttingDownError("the runtime is closed")
                here = self._local or not settings.local
                if here and name not in self._backends and not settings.has_several_servers:
                    self._backends[name] = self._build(name, settings)
            self.fleet = self.fleet or open_fleet(self.settings, self._backends)
            self._pools = {} if self.fleet is None else self.fleet.backends
            self._keep_tenants_apart()
            self._limit_upstreams()
            if self._local:
                self._build_strategies()
            self._started = True

    async def start_for(self, model: str) -> None:
        """Call `start` in a thread unless it is done. Raises `ModelNotFoundError` first, and what `start` raises."""
        self._resolve(self.aliases.meant(model))
        if not self.ready:
            await anyio.to_thread.run_sync(self.start)

    def models(self) -> list[str]:
        """The model names that `route` knows; a sole upstream accepts further names."""
        return list(self._names)

    @property
    def takes_any_model(self) -> bool:
        """Whether requests for names that `models` does not list go to the sole upstream."""
        return self._passthrough is not None

    def is_elsewhere(self, model: str) -> bool:
        """Whether another process answers for `model`. Raises `ModelNotFoundError` if it is unknown."""
        if self._local:
            return False
        backend, _ = self._resolve(model)
        local = backend in self.settings.backends and self.settings.backends[backend].local  # a pool is none of them
        return local or isinstance(self.settings.models.get(model), StrategySettings)

    @property
    def keeps_index(self) -> bool:
        """Whether a local engine of this process keeps an index of tokens in `cache`."""
        return self.ready and self._local and any(backend.local for backend in self.settings.backends.values())

    def backends(self) -> dict[str, Backend]:
        """The backends and pools by name; empty before `start()`."""
        return {**self._backends, **self._pools} if self.ready else {}

    def route(self, model: str) -> Route:
        """The backend for `model`. Raises `ModelNotFoundError` if it is unknown, `NotReadyError` before `start()`."""
        model = self.aliases.meant(model)
        backend_name, upstream_model = self._resolve(model)
        if not self.ready:
            raise ShuttingDownError("the runtime is closed") if self._closed else NotReadyError("call start() first")
        if model in self._strategies:
            return Route(backend_name, self._strategies[model], upstream_model)
        return Route(backend_name, self._backend(backend_name), upstream_model)

    def _backend(self, name: str) -> Backend:
        return self._pools.get(name) or self._backends[name]

    def with_strategy(self, model: str, strategy: str | None) -> str:
        """The name of the model that answers for `model` by `strategy`, a name or a kind; "plain" is without one.

        `model` itself where its upstream, which may be another gateway, has to decide. Raises `InvalidRequestError` if
        no model of the settings has this strategy and the base of `model`, `ModelNotFoundError` as `route`.
        """
        if strategy is None:
            return model
        base = self._base(self.aliases.meant(model))
        found = strategies_of(self.settings, base)
        found |= {name: "plain" for name, meant in self._names.items() if meant == base and name not in found}
        named = [name for name, kind in found.items() if strategy in (name, kind)]
        if self.aliases.meant(model) in named:
            return model
        if named:
            return named[0]
        if set(found.values()) <= {"plain"} and self._is_upstream(base[0]):
            return model
        known = ", ".join(sorted({*found, *found.values()}))
        raise InvalidRequestError(f"{model!r} has no strategy {strategy!r} here; there is {known}", param="strategy")

    def _base(self, model: str) -> tuple[str, str]:
        """The backend of a model, or of a strategy's base model, and its own name for the model."""
        strategy = self.settings.models.get(model)
        if isinstance(strategy, StrategySettings):
            return named_model(self.settings, strategy.base)
        return self._resolve(model)

    def _is_upstream(self, name: str) -> bool:
        return name in self._pools or isinstance(self.settings.backends.get(name), OpenAISettings)

    def base_of(self, model: str) -> Route:
        """The route of a plain model; of a strategy, that of its base model. Raises as `route` does."""
        strategy = self.settings.models.get(self.aliases.meant(model))
        if not isinstance(strategy, StrategySettings):
            return self.route(model)
        self.route(model)
        backend_name, upstream_model = named_model(self.settings, strategy.base)
        return Route(backend_name, self._backend(backend_name), upstream_model)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Run `request` on the backend of its model, and start the runtime first if necessary.

        Closing the iterator cancels the request. Raises what `route`, `start` and the backend raise.
        """
        await self.start_for(request.model)
        model = self.with_strategy(request.model, request.strategy)
        route = self.route(model)
        configured = self.settings.backends.get(route.backend_name)
        if model in self._strategies or not self._is_upstream(route.backend_name):
            request = replace(request, strategy=None)  # it is not for the models that the strategy asks
        if configured is not None and configured.local:
            request = with_deadline(with_extra(request))
        store = request.store and self.settings.cache.store
        answer = route.backend.generate(replace(request, model=route.upstream_model, store=store))
        async with closing_items(answer):
            async for delta in answer:
                yield delta

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
        """Flush and close the cache, unless the caller passed it or nobody opened it. Blocks; idempotent."""
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

            return OpenAIBackend(settings, name=name)
        try:
            if isinstance(settings, EncoderSettings):
                from agentspec.backends.torch.encoder_backend import EncoderBackend

                return EncoderBackend.load(settings)
            from agentspec.backends.torch import TorchBackend
        except ModuleNotFoundError as error:
            advice = f'needs the package {error.name!r}: pip install "agentspec[torch]"'
            raise ConfigurationError(f"backends.{name}, of kind {settings.kind!r}, {advice}") from error
        return TorchBackend.load(settings, cache=self.cache)

    def limit_upstreams(self, max_tokens: int) -> None:
        """Let no answer that is generated here, also by strategies, ask an upstream for more than `max_tokens`."""
        self._most_tokens = max_tokens
        self._limit_upstreams()

    def _limit_upstreams(self) -> None:
        for backend in self._all():
            if self._most_tokens is not None and isinstance(backend, TakesLimits):
                backend.limit(self._most_tokens)

    def _all(self) -> list[Any]:
        """The backends, the servers of pools, and what looks after these."""
        fleet = self.fleet
        return [*self._backends.values(), *((fleet, *fleet.servers.values()) if fleet is not None else ())]

    def serve_tenants(self, names: Collection[str]) -> None:
        """Note that these are the tenants from now on: of several, each needs its salt in upstreams.

        Upstreams are not checked here: requests to one that cannot keep them apart are refused.
        """
        with self._joining:
            self._tenants = frozenset(names)
            if self._isolation is not None:
                self._isolation.required = len(names) > 1

    async def check_tenants(self, names: Collection[str]) -> None:
        """Raises `ConfigurationError` if these would be several tenants in place of one, and an upstream that answers
        cannot keep them apart.
        """
        isolation = self._isolation
        if len(names) > 1 and isolation is not None and not isolation.required:
            try:
                await asyncio.gather(*(upstream.check_isolation() for upstream in self._sharing()))
            except ConfigurationError as error:
                raise ConfigurationError(f"{error.message}; either takes a restart") from None

    def _sharing(self) -> list[SharesCaches]:
        return [one for one in self._all() if isinstance(one, SharesCaches)]

    def _keep_tenants_apart(self) -> None:
        """Tell every upstream's backend how. Raises `ConfigurationError` if one that answers cannot do it."""
        upstreams = self._sharing()
        if not upstreams:
            return
        from agentspec.backends.openai.isolation import TenantIsolation

        secret = self.settings.server.read_secret()
        with self._joining:  # a reload may change the tenants meanwhile
            self._isolation = isolation = TenantIsolation(secret, required=len(self._tenants) > 1)
        for upstream in upstreams:
            upstream.isolate(isolation)

        async def check_all() -> None:
            for upstream in upstreams:
                await upstream.check_isolation()
                await upstream.leave_loop()

        if isolation.required:
            _run_apart(check_all)

    def _build_strategies(self) -> None:
        wanted = {name: model for name, model in self.settings.models.items() if isinstance(model, StrategySettings)}
        if not wanted or self._strategies:
            return
        from agentspec.reasoning.delegation.trace import open_folder
        from agentspec.reasoning.strategy import Dependencies, ModelRef, open_strategy, prepare

        def find(name: str) -> ModelRef:
            backend_name, model = named_model(self.settings, name)
            return ModelRef(self._backend(backend_name), model)

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

            self._knowledge[name] = open_knowledge(self.settings.knowledge[name], name)
        return self._knowledge[name]

    def _resolve(self, model: str) -> tuple[str, str]:
        if model in self._names:
            return self._names[model]
        if self._passthrough is not None:
            return self._passthrough, self.settings.backends[self._passthrough].model or model
        known = ", ".join(repr(name) for name in (*self._names, *self.aliases)) or "none"
        raise ModelNotFoundError(f"no model {model!r} here; configured: {known}", param="model")


def _run_apart(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end on a new event loop, from a thread that may already run one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(make())).result()
