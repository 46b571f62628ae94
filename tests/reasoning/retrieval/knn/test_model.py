"""KNN-LM as a model name, on a tiny model, and on the default one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.backends.base import AddsHeaders
from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.errors import ConfigurationError, NotReadyError
from agentspec.protocol.speculation import KnnSpeculation
from agentspec.reasoning.retrieval.knn.backend import KnnBackend
from agentspec.reasoning.retrieval.knn.datastore import Corpus, build
from agentspec.reasoning.settings import KnnLmSettings
from agentspec.reasoning.strategy import ModelRef
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.testing import FakeBackend
from agentspec.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.anyio

FACTS = [
    "The river Oder rises in the Czech Republic and flows through western Poland to the Baltic Sea.",
    "The river Elbe rises in the Czech Republic and flows through Germany to the North Sea.",
    "The river Rhine rises in the Swiss Alps and flows through Germany and the Netherlands to the North Sea.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
]


async def make_store(backend: TorchBackend, folder: Path) -> Path:
    corpus = folder / "facts.jsonl"
    corpus.write_text("".join(json.dumps({"text": fact}) + "\n" for fact in FACTS))
    await build(Corpus((corpus,)), folder / "store", backend, "m", backend.encode, lambda progress: None)
    return folder / "store"


async def text_of(model: Any, request: GenerateRequest) -> tuple[str, KnnSpeculation]:
    deltas = [delta async for delta in model.generate(request)]
    assert isinstance(deltas[-1].speculation, KnnSpeculation)
    return "".join(delta.text for delta in deltas), deltas[-1].speculation


def settings_of(model: Path, store: Path, **table: Any) -> Settings:
    models = {"facts": {"strategy": "knnlm", "base": "local", "datastore": str(store), "temperature": 20.0} | table}
    backends = {"local": {"kind": "torch", "model": str(model)}}
    return Settings(backends=backends, models=models)  # type: ignore[arg-type]


async def test_a_model_name_answers_with_a_datastore(tiny_model: Path, tmp_path: Path) -> None:
    backend = TorchBackend.load(TorchSettings(model=str(tiny_model)))
    store = await make_store(backend, tmp_path)
    await backend.aclose()
    async with Runtime(settings_of(tiny_model, store)) as runtime:
        messages = [{"role": "user", "content": "The river"}]
        request = GenerateRequest("facts", messages=messages, sampling=SamplingParams(temperature=0, max_tokens=20))
        text, took = await text_of(runtime, request)
        assert text and took.strategy == "knnlm" and took.steps >= 20
        opened = runtime.route("facts").backend
        assert opened.capabilities.token_ids and not opened.capabilities.logprobs
        assert isinstance(opened, AddsHeaders)
        headers = opened.response_headers(request)
        assert headers == {"x-agentspec-lossless": "knnlm; neighbours=16; weight=0.25; temperature=20.0"}


async def test_a_datastore_that_is_not_there_is_a_configuration_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"models\.facts: .* holds no datastore"):
        Runtime(settings_of(tiny_model, tmp_path)).start()


async def test_the_base_must_be_local(tmp_path: Path) -> None:
    strategy = KnnBackend("facts", KnnLmSettings(base="far", datastore=tmp_path), ModelRef(FakeBackend(), "far"))
    with pytest.raises(ConfigurationError, match=r'models\.facts: .*"torch"'):
        await strategy.prepare()
    with pytest.raises(NotReadyError):
        await anext(strategy.generate(GenerateRequest("facts", text="x")))
