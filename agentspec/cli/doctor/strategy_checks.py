"""The strategy checks of `agentspec doctor`: how each model continues an answer, or what to change."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentspec.backends.base import NONE, Backend, Capabilities
from agentspec.backends.settings import EncoderSettings, OpenAISettings, TorchSettings
from agentspec.cli.doctor.checks import Check
from agentspec.errors import AgentSpecError, ConfigurationError, InvalidRequestError
from agentspec.reasoning.settings import StrategySettings
from agentspec.settings.load import Settings
from agentspec.types import Delta, GenerateRequest, LossyAcceptance, Message

if TYPE_CHECKING:
    from agentspec.backends.openai import ProbeReport
    from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
    from agentspec.reasoning.strategy import Strategy


class Unloaded:
    """A stand-in for a local model that reads only its tokenizer and chat template, not its weights.

    Methods other than `fingerprint` raise `ModelUnavailableError` for a tokenizer that cannot be read.
    """

    capabilities = Capabilities(token_ids=True, continue_final=True, logprobs=True, speculation=True)

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings

    @cached_property
    def _codec(self) -> TokenizerAdapter:
        from agentspec.backends.torch.text.tokenizer import TokenizerAdapter, load_tokenizer

        return TokenizerAdapter(load_tokenizer(self._settings.model)[0])

    @property
    def fingerprint(self) -> str:
        from agentspec.backends.model_store import resolve
        from agentspec.backends.torch.model.lora import with_adapter

        return with_adapter(resolve(self._settings.model).fingerprint, self._settings.adapter)

    async def probe(self, timeout: float) -> ProbeReport:
        from agentspec.backends.openai import ProbeReport

        return ProbeReport(answers=self._codec is not None)

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

    def prepare_acceptance(self, rule: LossyAcceptance) -> None:
        """Check what `rule` needs. Raises `ConfigurationError` as a loaded model does."""
        self._settings.require_draft_model()
        if rule.judge_head is not None:
            from agentspec.backends.torch.sampling.judge_head import JudgeHead

            JudgeHead.load(Path(rule.judge_head), fingerprint=self.fingerprint, width=None)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        raise InvalidRequestError("this model is not loaded")
        yield Delta()

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""


def check_strategies(settings: Settings) -> Iterator[Check]:
    """One check for each [models.NAME] table with a strategy."""
    for name, model in settings.models.items():
        if isinstance(model, StrategySettings):
            yield check_strategy(name, settings)


def check_strategy(name: str, settings: Settings) -> Check:
    """Whether the strategy's models can play their roles, checked as the gateway does when it starts."""
    from agentspec.backends.model_store import locate

    strategy: Any = settings.models[name]
    label = f"{name}: {strategy.strategy}"
    absent = [ref for ref in _local_models(name, settings) if locate(ref) is None]
    if absent:
        return Check(label, "note", f"not known before {absent[0]} is here", f"agentspec model fetch {absent[0]}")
    try:
        built, silent = _inspected(name, settings)
    except (AgentSpecError, ImportError) as error:
        return Check(label, "fail", str(error), f"correct models.{name}")
    found = "; ".join(built.describe(role) for role in built.roles if role not in silent)
    if silent:
        detail = f"no answer from {' and '.join(silent)}; {found or 'none'}"
        return Check(label, "fail" if "base" in silent else "note", detail, "start what is missing")
    return Check(label, "ok", found)


def _inspected(name: str, settings: Settings) -> tuple[Strategy[Any], list[str]]:
    """The strategy built on stand-ins for its models, and the roles whose models do not answer.

    The strategy gets no knowledge base, which has its own check.
    """
    import anyio

    from agentspec.reasoning.strategy import Dependencies, ModelRef, open_strategy
    from agentspec.settings.model_names import named_model
    from agentspec.settings.pools import open_fleet

    backends: dict[str, Backend] = {}
    fleet = open_fleet(settings, {})
    pools = {} if fleet is None else fleet.backends

    def find(role: str) -> ModelRef:
        backend_name, model = named_model(settings, role)
        if backend_name not in backends:
            backends[backend_name] = pools.get(backend_name) or _stand_in(settings, backend_name)
        return ModelRef(backends[backend_name], model)

    async def probed() -> list[str]:
        try:
            return await built.inspect()
        finally:
            for one in (*backends.values(), *((fleet,) if fleet else ())):
                await one.aclose()

    strategy: Any = settings.models[name]
    built = open_strategy(name, strategy, Dependencies(find, lambda knowledge: cast(Any, None)))
    return built, anyio.run(probed)


def _stand_in(settings: Settings, name: str) -> Backend:
    """What answers for a backend."""
    from agentspec.backends.openai import OpenAIBackend

    backend = settings.backends[name]
    if isinstance(backend, TorchSettings):
        return Unloaded(backend)
    if isinstance(backend, EncoderSettings):
        raise ConfigurationError('it is an embedding model (kind = "encoder"), which answers nothing')
    return OpenAIBackend(backend)


def _local_models(name: str, settings: Settings) -> list[str]:
    """The strategy's models that run on local backends."""
    from agentspec.settings.model_names import named_model

    strategy: Any = settings.models[name]
    names = [named_model(settings, model)[0] for model in strategy.models.values()]
    backends = [settings.backends[name] for name in names if name in settings.backends]  # others are pools of upstreams
    return [backend.model for backend in backends if not isinstance(backend, OpenAISettings)]
