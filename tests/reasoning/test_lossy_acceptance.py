"""`strategy = "lossy_acceptance"`: who gets lossy answers, how they are labelled, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.errors import ConfigurationError
from agentspec.protocol.responses import speculation_member
from agentspec.protocol.speculation import LossyAcceptanceSpeculation, read_speculation
from agentspec.reasoning.lossy_acceptance import LossyAcceptanceBackend
from agentspec.reasoning.settings import LossyAcceptanceSettings
from agentspec.reasoning.strategy import Dependencies, ModelRef
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import FakeBackend
from agentspec.types import GenerateRequest, SamplingParams, StructuredOutputs
from tests.proxy.conftest import run_gateway

pytestmark = pytest.mark.anyio
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def settings(model: Path, **fields: Any) -> Settings:
    rule: dict[str, Any] = {"tenants": ("a",), "epsilon": 1e-6, **fields}
    return Settings(
        backends={"local": TorchSettings(model=str(model), draft_model=str(model), device="cpu")},
        models={"exact": ModelSettings(backend="local"), "fast": LossyAcceptanceSettings(base="exact", **rule)},
    )


def asking(model: str = "fast", tenant: str = "a", **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(temperature=1.5, seed=4, max_tokens=12, structured_outputs=fields.pop("form", None))
    messages = [{"role": "user", "content": "Say something"}]
    return GenerateRequest(model, messages=messages, tenant=tenant, sampling=sampling, **fields)


async def answer(runtime: Runtime, request: GenerateRequest) -> Any:
    deltas = [delta async for delta in runtime.generate(request)]
    return "".join(delta.text for delta in deltas), deltas[-1].speculation


async def test_i10_only_named_tenants_and_free_answers_are_lossy_and_labelled(tiny_model: Path) -> None:
    async with Runtime(settings(tiny_model)) as runtime:
        fast = runtime.route("fast").backend
        assert isinstance(fast, LossyAcceptanceBackend)
        exact, _ = await answer(runtime, asking("exact"))
        _, figures = await answer(runtime, asking())
        assert isinstance(figures, LossyAcceptanceSpeculation) and figures.knobs["epsilon"] == 1e-6
        assert replace(
            read_speculation(speculation_member(figures)["speculation"]), estimated_seconds_saved=0
        ) == replace(figures, estimated_seconds_saved=0)
        header = fast.response_headers(asking())
        assert header == {"x-agentspec-lossy": "lossy_acceptance; epsilon=1e-06; delta=0.001"}
        greedy = asking()
        greedy = replace(greedy, sampling=replace(greedy.sampling, temperature=0.0))
        others = [greedy, asking(tenant="b"), asking(speculation=False), asking(tools=(TOOL,))]
        others.append(asking(form=StructuredOutputs(regex="[a-z]{3}")))
        for request in others:
            text, figures = await answer(runtime, request)
            assert not isinstance(figures, LossyAcceptanceSpeculation) and fast.response_headers(request) == {}
            if not request.tools and request.sampling.structured_outputs is None and not request.sampling.greedy:
                assert text == exact
        assert fast.response_headers(asking(extra={"response_format": {"type": "json_object"}})) == {}


def test_the_gateway_says_which_answers_are_lossy(tiny_model: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 4}
    with run_gateway({}, settings(tiny_model, tenants=("*",))) as running:
        for temperature, lossy in ((1.5, True), (0.0, False)):
            asked = {**body, "model": "fast", "temperature": temperature}
            answer = httpx.post(f"{running.url}/v1/chat/completions", json=asked, timeout=60)
            assert ("x-agentspec-lossy" in answer.headers) is lossy is ('"lossy":true' in answer.text)


def test_an_upstream_cannot_be_lossy() -> None:
    knobs = LossyAcceptanceSettings(base="base", tenants=("*",))
    found = Dependencies(lambda name: ModelRef(FakeBackend("a"), name), lambda name: pytest.fail(name))
    with pytest.raises(ConfigurationError, match="must be a local model"):
        LossyAcceptanceBackend.open("fast", knobs, found)


async def test_a_model_without_a_draft_model_is_refused(tiny_model: Path) -> None:
    alone = settings(tiny_model)
    alone = alone.model_copy(update={"backends": {"local": TorchSettings(model=str(tiny_model), device="cpu")}})
    await refused(alone, "set draft_model")


async def refused(configured: Settings, message: str) -> None:
    runtime = Runtime(configured)
    with pytest.raises(ConfigurationError, match=message):
        runtime.start()
    await runtime.aclose()  # what was built before the error keeps its memory until then
