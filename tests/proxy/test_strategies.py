"""Strategies whose models are endpoints: what is found out of them when the strategy is made ready."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from agentspec.backends.base import Capabilities
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Query, SearchResult
from agentspec.reasoning.retrieval.knowledge.bm25 import Bm25Metric
from agentspec.reasoning.settings import RaLMSpecSettings, RemoteSettings, SpecReasonSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.types import GenerateRequest
from tests.thinking_model import ThinkingModel

DOWN = OpenAISettings(base_url="http://127.0.0.1:9/v1", model="m")  # type: ignore[arg-type]


def settings(large: Any = DOWN, tiny: Any = DOWN, **knobs: Any) -> Settings:
    models = {
        "fast": SpecReasonSettings(base="large", small="tiny", **knobs),
        "reader": RaLMSpecSettings(base="large", knowledge="kb"),
        "plain": ModelSettings(backend="tiny"),
    }
    knowledge = {"kb": RemoteSettings(url="http://127.0.0.1:9")}  # type: ignore[arg-type]
    return Settings(backends={"large": large, "tiny": tiny}, models=models, knowledge=knowledge)


class Deaf(ThinkingModel):
    """Answers a message that it should continue, as endpoints do that ignore what they do not know."""

    def prompt_text(self, request: GenerateRequest) -> str:
        return super().prompt_text(replace(request, continue_final=False))


class Nowhere:
    metric = Bm25Metric()

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        return SearchResult("1", ((),) * len(queries))

    async def aclose(self) -> None: ...


@pytest.fixture
def serving(gateway: Any) -> Any:
    """An endpoint that continues messages, unless its model is of a kind that does not."""

    def serve(kind: type[ThinkingModel] = ThinkingModel) -> OpenAISettings:
        known = Capabilities(continue_final=True, logprobs=True)
        running = gateway({"m": kind(lambda thinking: "one\n\n", capabilities=known)})
        return OpenAISettings(base_url=f"{running.url}/v1", model="m")  # type: ignore[arg-type]

    return serve


def refused(configured: Settings) -> str:
    """Why a runtime with these settings does not start."""
    with pytest.raises(ConfigurationError) as caught:
        Runtime(configured, knowledge={"kb": Nowhere()}).start()
    return str(caught.value)


def test_an_endpoint_that_cannot_play_its_part_is_an_error_at_the_start(serving: Any) -> None:
    thinking = settings(serving(Deaf), serving())
    assert "name another model as base" in refused(thinking)
    assert "takes no token ids" in refused(settings(serving(), serving()))


def pool(gateway: Any, *takes_ids: bool) -> OpenAISettings:
    """Servers of one vocabulary, with token ids and without."""
    shared, urls = ThinkingModel(lambda thinking: "one Answer: 1\n\n"), []
    for ids in takes_ids:
        model = copy(shared)
        model._capabilities = Capabilities(continue_final=True, logprobs=True, token_ids=ids)
        urls.append(f"{gateway({'m': model}).url}/v1")
    return OpenAISettings(base_urls=urls, model="m")  # type: ignore[arg-type]


def test_a_pool_takes_token_ids_where_each_of_its_servers_does(gateway: Any) -> None:
    able = pool(gateway, True, True)

    async def answers() -> list[str]:
        texts = []
        async with Runtime(settings(able, able), knowledge={"kb": Nowhere()}) as runtime:
            for model in ("fast", "reader"):
                ask = GenerateRequest(model, messages=[{"role": "user", "content": "Two?"}])
                texts.append("".join([delta.text async for delta in runtime.generate(ask)]))
        return texts

    assert asyncio.run(answers()) == ["The answer is four.", "one Answer: 1\n\n"]
    assert "takes no token ids" in refused(settings(pool(gateway, True, False), able))
