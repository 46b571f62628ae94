"""Builds what the settings describe: backends, the salts that keep tenants apart at upstreams, and strategies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from agentspec.backends.base import Backend, SharesCaches
from agentspec.backends.model_store import require_known
from agentspec.backends.settings import BackendSettings, EncoderSettings, OpenAISettings
from agentspec.errors import ConfigurationError, extra_of, install_advice
from agentspec.reasoning.settings import StrategySettings
from agentspec.settings.load import Settings
from agentspec.settings.models import named_model
from agentspec.settings.server import ServerSettings

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache
    from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
    from agentspec.reasoning.strategy import ModelRef, Strategy


def build_backend(name: str, settings: BackendSettings, open_cache: Callable[[], SuffixCache]) -> Backend:
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
            from agentspec.backends.torch.embeddings import EncoderBackend

            return EncoderBackend.load(settings)
        from agentspec.backends.torch import TorchBackend
    except ModuleNotFoundError as error:
        if not extra_of(error.name, ["torch"]):
            raise
        advice = f"needs the package {error.name!r}; {install_advice('torch')}"
        raise ConfigurationError(f"backends.{name}, of kind {settings.kind!r}, {advice}") from error
    return TorchBackend.load(settings, cache=open_cache())


def keep_tenants_apart(upstreams: Sequence[SharesCaches], settings: ServerSettings) -> None:
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


def build_strategies(
    settings: Settings, find_backend: Callable[[str], Backend], knowledge: dict[str, KnowledgeBase]
) -> dict[str, Strategy[Any]]:
    """The strategies of the settings, prepared, by model name. `find_backend` looks up the backends of their models.

    Knowledge bases that are not in `knowledge` are opened and added to it, each once for all strategies. Raises
    `ConfigurationError` for a model that cannot play its role.
    """
    wanted = {name: model for name, model in settings.models.items() if isinstance(model, StrategySettings)}
    if not wanted:
        return {}
    from agentspec.reasoning.delegation.trace import open_folder
    from agentspec.reasoning.strategy import Dependencies, ModelRef, open_strategy, prepare

    def find(name: str) -> ModelRef:
        backend_name, model = named_model(settings, name)
        return ModelRef(find_backend(backend_name), model)

    def knowledge_base(name: str) -> KnowledgeBase:
        if name not in knowledge:
            from agentspec.reasoning.retrieval.knowledge.folder import open_knowledge

            knowledge[name] = open_knowledge(settings.knowledge[name], name)
        return knowledge[name]

    dependencies = Dependencies(find, knowledge_base, open_folder(settings.traces))
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
