"""What `agentspec doctor` says of strategies: how each model goes on with an answer, or what to change."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from agentspec.backends.base import NONE, Backend, Capabilities
from agentspec.backends.settings import BackendSettings, OpenAISettings
from agentspec.cli.doctor.checks import Check
from agentspec.errors import AgentSpecError, ConfigurationError, InvalidRequestError
from agentspec.reasoning.settings import KnnLmSettings, StrategySettings
from agentspec.settings.load import Settings
from agentspec.types import Delta, GenerateRequest, Message

if TYPE_CHECKING:
    from agentspec.reasoning.factory import Strategy


class Unloaded:
    """A local model as far as its files tell without the weights: its tokenizer and its chat template.

    Raises `ModelUnavailableError` for a tokenizer that cannot be read.
    """

    capabilities = Capabilities(token_ids=True, continue_final=True, logprobs=True, speculation=True)

    def __init__(self, model: str) -> None:
        from agentspec.backends.torch.loader import load_tokenizer
        from agentspec.backends.torch.text.tokenizer import Codec

        self._codec = Codec(load_tokenizer(model)[0])

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        return self._codec.render(messages, tools=tools, template_arguments=template_arguments)

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        return self._codec.encode(text, special=begins)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        raise InvalidRequestError("this model is not loaded")
        yield Delta()

    async def aclose(self) -> None:
        """It holds nothing."""


def check_strategies(settings: Settings) -> Iterator[Check]:
    """A line for each [models.NAME] with a strategy."""
    for name, model in settings.models.items():
        if isinstance(model, StrategySettings):
            yield check_strategy(name, settings)


def check_strategy(name: str, settings: Settings) -> Check:
    """Whether the strategy's models can play their roles, found out as it is when the gateway starts."""
    from agentspec.backends.model_store import locate

    strategy: Any = settings.models[name]
    label = f"{name}: {strategy.strategy}"
    absent = [ref for ref in _local_models(name, settings) if locate(ref) is None]
    if absent:
        return Check(label, "note", f"not known before {absent[0]} is here", f"agentspec model fetch {absent[0]}")
    try:
        if isinstance(strategy, KnnLmSettings):
            return Check(label, "ok", _datastore(strategy, settings))
        built, silent = _prepared(name, settings)
    except (AgentSpecError, ImportError) as error:
        return Check(label, "fail", str(error), f"correct models.{name}")
    roles = getattr(built, "writers", ("base",))
    found = "; ".join(_described(built, role) for role in roles if role not in silent)
    if silent:
        detail = f"no answer from {' and '.join(silent)}; {found or 'none'}"
        return Check(label, "fail" if "base" in silent else "note", detail, "start what is missing")
    return Check(label, "ok", found)


def _datastore(strategy: KnnLmSettings, settings: Settings) -> str:
    """What a KNN-LM's datastore holds. Raises `ConfigurationError` for one that its model cannot use."""
    from agentspec.backends.model_store import resolve
    from agentspec.backends.torch.model.lora import with_adapter
    from agentspec.reasoning.retrieval.knn.store import Datastore
    from agentspec.runtime import named_model

    base = settings.backends[named_model(settings, strategy.base)[0]]
    if isinstance(base, OpenAISettings):
        raise ConfigurationError(f'KNN-LM needs a local model: {strategy.base!r} is no backend of kind "torch"')
    fingerprint = with_adapter(resolve(base.model).fingerprint, base.adapter)
    store = Datastore.open(strategy.datastore, fingerprint=fingerprint, model=strategy.base)
    return f"base = {strategy.base}; {store.manifest.entries} entries in {strategy.datastore}"


def _described(built: Strategy, role: str) -> str:
    from agentspec.reasoning.delegation.backend import DelegationBackend

    if not isinstance(built, DelegationBackend):
        return f"base = {built.settings.base} (token ids)"
    writer = built.writers[role]
    if role == "judge" and writer is built.writers["base"]:
        return "judge = base"
    deletes = "" if writer.keeps_thinking else ", but its template deletes closed thinking"
    return f"{role} = {getattr(built.settings, role)} ({writer.way}{deletes})"


def _prepared(name: str, settings: Settings) -> tuple[Strategy, list[str]]:
    """The strategy over stand-ins for its models, and the roles whose models do not answer.

    Its knowledge base is left out: that has a line of its own.
    """
    import anyio

    from agentspec.reasoning.factory import Dependencies, ModelRef, open_strategy, prepare
    from agentspec.runtime import named_model

    backends: dict[str, Backend] = {}

    def find(role: str) -> ModelRef:
        backend_name, model = named_model(settings, role)
        if backend_name not in backends:
            backends[backend_name] = _stand_in(settings.backends[backend_name])
        return ModelRef(backends[backend_name], model)

    async def probed() -> list[str]:
        try:
            return await prepare(built)
        finally:
            for backend in backends.values():
                await backend.aclose()

    strategy: Any = settings.models[name]
    built = open_strategy(name, strategy, Dependencies(find, lambda knowledge: cast(Any, None)))
    with _unlogged():
        return built, anyio.run(probed)


def _stand_in(settings: BackendSettings) -> Backend:
    if isinstance(settings, OpenAISettings):
        from agentspec.backends.openai import OpenAIBackend

        return OpenAIBackend(settings)
    return Unloaded(settings.model)


def _local_models(name: str, settings: Settings) -> list[str]:
    """The models in the strategy's roles that run here."""
    from agentspec.runtime import named_model

    strategy: Any = settings.models[name]
    backends = [settings.backends[named_model(settings, model)[0]] for model in strategy.models.values()]
    return [backend.model for backend in backends if not isinstance(backend, OpenAISettings)]


@contextmanager
def _unlogged() -> Iterator[None]:
    """What the result says is not logged besides."""
    opening = logging.getLogger("agentspec.reasoning.factory")
    before, opening.disabled = opening.disabled, True
    try:
        yield
    finally:
        opening.disabled = before
