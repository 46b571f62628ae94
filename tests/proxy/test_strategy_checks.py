from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.backends.base import Capabilities
from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.cli.doctor import strategy_checks
from agentspec.cli.doctor.checks import Check
from agentspec.cli.doctor.strategy_checks import Unloaded, check_strategies
from agentspec.reasoning.retrieval.knn.datastore import DatastoreManifest, DatastoreWriter
from agentspec.reasoning.retrieval.knowledge.base import Query, SearchResult
from agentspec.reasoning.retrieval.knowledge.bm25 import Bm25Metric
from agentspec.reasoning.retrieval.knowledge.settings import RemoteSettings
from agentspec.reasoning.settings import (
    KnnLmSettings,
    LossyAcceptanceSettings,
    RaLMSpecSettings,
    SpecReasonSettings,
)
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.types import GenerateRequest
from tests.thinking_model import ThinkingModel

DOWN = OpenAISettings(base_url="http://127.0.0.1:9/v1", model="m")  # type: ignore[arg-type]


def settings(large: Any = DOWN, tiny: Any = DOWN, **knobs: Any) -> Settings:
    fast = SpecReasonSettings(base="large", small="tiny", **knobs)
    return Settings(
        backends={"large": large, "tiny": tiny}, models={"fast": fast, "plain": ModelSettings(backend="tiny")}
    )


class Deaf(ThinkingModel):
    """Answers a message that it should continue, as endpoints do that ignore what they do not know."""

    def prompt_text(self, request: GenerateRequest) -> str:
        return super().prompt_text(replace(request, continue_final=False))


@pytest.fixture
def serving(gateway: Any) -> Any:
    """An endpoint that continues messages, unless its model is of a kind that does not."""

    def serve(kind: type[ThinkingModel] = ThinkingModel) -> OpenAISettings:
        known = Capabilities(continue_final=True, logprobs=True)
        running = gateway({"m": kind(lambda thinking: "one\n\n", capabilities=known)})
        return OpenAISettings(base_url=f"{running.url}/v1", model="m")  # type: ignore[arg-type]

    return serve


def test_each_role_says_how_it_goes_on(serving: Any) -> None:
    endpoint = serving()
    configured = settings(endpoint, endpoint, judge="plain")
    (check,) = check_strategies(configured)
    assert (check.name, check.state) == ("fast: specreason", "ok")
    assert check.detail == (
        "base = large (continues messages); small = tiny (continues messages); judge = plain (continues messages)"
    )
    (alone,) = check_strategies(settings(endpoint, endpoint))
    assert alone.detail.endswith("judge = base")


def test_what_cannot_go_on_says_what_to_change(serving: Any) -> None:
    (check,) = check_strategies(settings(serving(Deaf), serving()))
    assert (
        check.state == "fail" and "name another model as base" in check.detail and check.advice == "correct models.fast"
    )


def test_an_endpoint_that_is_down_is_named(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    (check,) = check_strategies(settings(serving()))
    assert (check.state, check.detail) == (
        "note",
        "no answer from small; base = large (continues messages); judge = base",
    )
    (check,) = check_strategies(settings())
    assert check.state == "fail" and check.detail.startswith("no answer from base and small")
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record for record in warnings if record.name.startswith("agentspec")] == []


def test_local_models_are_known_without_their_weights(tiny_model: Path, tmp_path: Path) -> None:
    local = TorchSettings(model=str(tiny_model))
    (check,) = check_strategies(settings(local, local))
    assert check.state == "ok" and check.detail.startswith("base = large (token ids); small = tiny (token ids)")
    absent = TorchSettings(model="nobody/nothing")
    (check,) = check_strategies(settings(absent, absent))
    assert (check.state, check.advice) == ("note", "agentspec model fetch nobody/nothing")


def test_retrieval_needs_a_model_that_takes_token_ids(serving: Any, tiny_model: Path) -> None:
    knowledge = {"kb": RemoteSettings(url="http://127.0.0.1:9")}  # type: ignore[arg-type]
    reader = RaLMSpecSettings(base="large", knowledge="kb")

    def check(base: Any) -> Check:
        (found,) = check_strategies(Settings(backends={"large": base}, models={"reader": reader}, knowledge=knowledge))
        return found

    found = check(TorchSettings(model=str(tiny_model)))
    assert (found.name, found.state, found.detail) == ("reader: ralmspec", "ok", "base = large (token ids)")
    found = check(serving())
    assert found.state == "fail" and "takes no token ids" in found.detail
    assert check(DOWN).detail.startswith("no answer from base")


def pool(gateway: Any, *takes_ids: bool) -> OpenAISettings:
    """Servers of one vocabulary, with token ids and without."""
    shared, urls = ThinkingModel(lambda thinking: "one Answer: 1\n\n"), []
    for ids in takes_ids:
        model = copy(shared)
        model._capabilities = Capabilities(continue_final=True, logprobs=True, token_ids=ids)
        urls.append(f"{gateway({'m': model}).url}/v1")
    return OpenAISettings(base_urls=urls, model="m")  # type: ignore[arg-type]


def test_a_pool_takes_token_ids_where_each_of_its_servers_does(gateway: Any) -> None:
    class Nowhere:
        metric = Bm25Metric()

        async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
            return SearchResult("1", ((),) * len(queries))

        async def aclose(self) -> None: ...

    able = pool(gateway, True, True)
    reader = RaLMSpecSettings(base="large", knowledge="kb")
    reading = settings(able, able).model_copy(update={"knowledge": {"kb": RemoteSettings(url="http://127.0.0.1:9")}})  # type: ignore[arg-type]
    reading = reading.model_copy(update={"models": {**reading.models, "reader": reader}})

    async def answers() -> list[str]:
        texts = []
        async with Runtime(reading, knowledge={"kb": Nowhere()}) as runtime:
            for model in ("fast", "reader"):
                ask = GenerateRequest(model, messages=[{"role": "user", "content": "Two?"}])
                texts.append("".join([delta.text async for delta in runtime.generate(ask)]))
        return texts

    assert asyncio.run(answers()) == ["The answer is four.", "one Answer: 1\n\n"]
    (check,) = check_strategies(settings(able, pool(gateway, True, False)))
    assert check.detail.startswith("base = large (token ids); small = tiny (continues messages)")


def test_lossy_acceptance_needs_a_draft_model_and_its_own_judge(tiny_model: Path, tmp_path: Path) -> None:
    import torch

    from agentspec.backends.model_store import resolve
    from agentspec.backends.torch.sampling.judge_head import JudgeHead

    def check(local: TorchSettings, **rule: Any) -> Check:
        quick = LossyAcceptanceSettings(base="local", tenants=("*",), **rule)
        (found,) = check_strategies(Settings(backends={"local": local}, models={"quick": quick}))
        return found

    drafting = TorchSettings(model=str(tiny_model), draft_model=str(tiny_model))
    assert check(drafting).state == "ok"
    alone = check(TorchSettings(model=str(tiny_model)))
    assert alone.state == "fail" and "set draft_model" in alone.detail
    silent = check(drafting.model_copy(update={"max_draft_tokens": 0}))
    assert silent.state == "fail" and "max_draft_tokens" in silent.detail
    path, own = tmp_path / "head.safetensors", resolve(str(tiny_model)).fingerprint
    for fingerprint, state in ((own, "ok"), ("another", "fail")):
        JudgeHead(torch.zeros(4), torch.tensor(0.0), fingerprint).save(path)
        assert check(drafting, rule="judge", judge_head=path).state == state


def test_a_datastore_must_be_the_models_own(serving: Any, tiny_model: Path, tmp_path: Path) -> None:
    from agentspec.backends.model_store import resolve

    def check(base: Any) -> Check:
        words = KnnLmSettings(base="large", datastore=tmp_path)
        (found,) = check_strategies(Settings(backends={"large": base}, models={"words": words}))
        return found

    local = TorchSettings(model=str(tiny_model))
    assert check(local).state == "fail" and "holds no datastore" in check(local).detail
    fresh = DatastoreManifest(str(tiny_model), resolve(str(tiny_model)).fingerprint, "corpus", width=4)
    with DatastoreWriter(tmp_path, fresh) as writer:
        writer.append([np.ones((3, 4), np.float32)], [[1, 2, 3]], 1)
        writer.finish()
    assert check(local).state == "ok" and check(local).detail.startswith("base = large; 3 entries in ")
    assert "needs a local model" in check(serving()).detail


def test_a_local_model_without_a_chat_template_is_told_to_name_one(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untaught(Unloaded):
        def __init__(self, settings: TorchSettings) -> None:
            super().__init__(settings)
            self._codec.tokenizer.chat_template = None

    monkeypatch.setattr(strategy_checks, "Unloaded", Untaught)
    local = TorchSettings(model=str(tiny_model))
    (check,) = check_strategies(settings(local, local))
    assert check.state == "fail" and "no chat template" in check.detail and "name another model as base" in check.detail
