"""Names, backends, cache and strategies of a runtime."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from agentspec.backends.base import Capabilities
from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.cache import SuffixCache
from agentspec.cache.settings import CacheSettings
from agentspec.errors import (
    ConfigurationError,
    ModelNotFoundError,
    ModelUnavailableError,
    NotReadyError,
    ShuttingDownError,
)
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest, StructuredOutputs, TokenLogprob, Usage

pytestmark = pytest.mark.anyio


def ask(model: str) -> GenerateRequest:
    return GenerateRequest(model=model, text="hello")


async def text_of(answer: AsyncIterator[Delta]) -> str:
    return "".join([delta.text async for delta in answer])


def upstream(**settings: Any) -> OpenAISettings:
    return OpenAISettings(base_url=cast(Any, "http://127.0.0.1:9/v1"), **settings)


async def test_default_settings_route_the_default_model() -> None:
    fake = FakeBackend("hi there")
    runtime = Runtime(Settings(), backends={"local": fake})
    assert runtime.models() == ["smollm2-135m"] and not runtime.ready
    assert await text_of(runtime.generate(ask("smollm2-135m"))) == "hi there"
    assert runtime.ready and fake.requests[0].model == "smollm2-135m"
    route = runtime.route("smollm2-135m")
    assert (route.backend_name, route.backend, route.upstream_model) == ("local", fake, "smollm2-135m")
    await runtime.aclose()


async def test_sole_upstream_takes_any_name() -> None:
    fake = FakeBackend()
    async with Runtime(Settings(backends={"up": upstream()}), backends={"up": fake}) as runtime:
        assert runtime.models() == []
        await text_of(runtime.generate(ask("llama-9000")))
    assert fake.requests[0].model == "llama-9000"
    async with Runtime(Settings(backends={"up": upstream(model="own")}), backends={"up": fake}) as runtime:
        assert runtime.models() == ["own"] and runtime.takes_any_model
        await text_of(runtime.generate(ask("llama-9000")))
    assert fake.requests[1].model == "own"


@pytest.mark.parametrize(
    "settings",
    [
        Settings(backends={"up": upstream(), "local": TorchSettings()}),
        Settings(backends={"up": upstream()}, models={"only": ModelSettings(backend="up")}),
    ],
)
def test_unknown_names_are_refused_with_several_backends_or_listed_models(settings: Settings) -> None:
    runtime = Runtime(settings, backends={name: FakeBackend() for name in settings.backends})
    runtime.start()
    with pytest.raises(ModelNotFoundError) as caught:
        runtime.route("llama-9000")
    assert caught.value.param == "model" and caught.value.status == 404


def test_two_backends_with_one_model_need_names() -> None:
    settings = Settings(backends={"a": TorchSettings(), "b": TorchSettings()})
    with pytest.raises(ConfigurationError, match=r"\[models.NAME\]"):
        Runtime(settings)


async def test_cache_settings_reach_the_cache_and_the_backend(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache, cache.request([1]) as request:
        request.extend([2])
    fake = FakeBackend()
    cached = CacheSettings(path=tmp_path, retention="0s", refuse_patterns=("secret",), store=False)
    runtime = Runtime(Settings(cache=cached), backends={"local": fake})
    await text_of(runtime.generate(ask("smollm2-135m")))
    assert fake.requests[0].store is False
    with runtime.cache as cache:
        assert (cache.stats().sequences, cache.stats().forgotten) == (0, 1)
        with cache.request([1], decode=lambda ids: "a secret") as request:
            request.extend([2])
        assert cache.stats().refused == 1


async def test_calls_before_start_and_after_close_are_refused() -> None:
    fake = FakeBackend()
    runtime = Runtime(Settings(), backends={"local": fake})
    with pytest.raises(NotReadyError, match="start"):
        runtime.route("smollm2-135m")
    await runtime.aclose()
    await runtime.aclose()
    assert fake.closed and not runtime.ready
    with pytest.raises(ShuttingDownError):
        runtime.start()
    with pytest.raises(ShuttingDownError):
        await text_of(runtime.generate(ask("smollm2-135m")))


def test_a_missing_package_is_reported_with_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("lost", name="torch.nn")

    package = ModuleType("agentspec.backends.torch")
    package.__getattr__ = absent  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    with pytest.raises(ConfigurationError, match=r"backends\.local.*pip install .*\[torch\]"):
        Runtime(Settings()).start()


def test_an_unknown_model_is_refused_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agentspec.backends.torch", None)  # importing it would fail
    settings = Settings(backends={"local": TorchSettings(model="nosuch")})
    with pytest.raises(ModelUnavailableError, match="no model 'nosuch'"):
        Runtime(settings).start()


async def test_the_local_engine_acts_on_extra_fields() -> None:
    fake = FakeBackend()
    runtime = Runtime(Settings(), backends={"local": fake})
    tool = {"type": "function", "function": {"name": "f"}}
    extra = {"tools": [tool], "tool_choice": "required", "guided_regex": "a", "n": 2, "return_token_ids": True}
    messages = [{"role": "user", "content": "hi"}]
    await text_of(runtime.generate(GenerateRequest("smollm2-135m", messages=messages, extra=extra)))
    [seen] = fake.requests
    assert seen.tools == (tool,) and seen.tool_choice == "required" and seen.return_prompt and not seen.extra
    assert seen.sampling.n == 2 and seen.sampling.structured_outputs == StructuredOutputs(regex="a")


@pytest.mark.parametrize("where", ["own field", "extra"])
async def test_thoughts_with_token_ids_and_logprobs_can_be_hidden(where: str) -> None:
    class Thinking:
        capabilities = Capabilities()

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            token = TokenLogprob(1, "why", -1.0)
            thought = {"reasoning": "why", "reasoning_content": "why", "other": 1}
            yield Delta(token_ids=(1,), logprobs=(token,), extra=thought)
            yield Delta("so", token_ids=(2,), finish_reason="stop", usage=Usage(1, 2))

        async def aclose(self) -> None: ...

    runtime = Runtime(backends={"remote": cast(Any, Thinking())})
    hiding = {"include_reasoning": False} if where == "own field" else {"extra": {"include_reasoning": False}}
    asked = replace(ask("remote"), **cast(Any, hiding))
    hidden = [delta async for delta in runtime.generate(asked)]
    assert hidden == [Delta(extra={"other": 1}), Delta("so", finish_reason="stop", usage=Usage(1, 2))]
    shown = [delta async for delta in runtime.generate(ask("remote"))]
    assert [len(delta.token_ids) for delta in shown] == [1, 1] and shown[0].extra["reasoning"] == "why"


def test_aliases_lead_to_models() -> None:
    aliases = {"claude-*": "small", "claude-opus-*": "large", "gpt-5": "large"}
    backends = {"small": FakeBackend(), "large": FakeBackend()}
    runtime = Runtime(Settings(backends={}, model_aliases=aliases), backends=backends)
    runtime.start()
    asked = ["claude-haiku-4-5", "claude-opus-5", "gpt-5", "small"]
    assert [runtime.route(name).model for name in asked] == ["small", "large", "large", "small"]
    assert list(runtime.aliases) == ["gpt-5"] and runtime.models() == ["small", "large"]
    with pytest.raises(ModelNotFoundError):
        runtime.route("gpt-5-mini")


@pytest.mark.parametrize("aliases", [{"small": "large"}, {"x": "missing"}, {"x": "y", "y": "small"}])
def test_aliases_that_cannot_work_are_refused(aliases: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="model_aliases"):
        Runtime(Settings(backends={}, model_aliases=aliases), backends={"small": FakeBackend(), "large": FakeBackend()})
