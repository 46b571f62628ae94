"""Strategies over a real vLLM server: its tokenizer is asked, and prompts are token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentspec.backends.base import tokenization_of
from agentspec.backends.model_store import locate
from agentspec.backends.settings import OpenAISettings
from agentspec.benchmarks.vllm.engine import find_environment
from agentspec.protocol.speculation import StepSpeculation
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.types import Delta, GenerateRequest, SamplingParams
from tests.vllm_server import VllmServer

ENVIRONMENT = find_environment(Path(__file__).parents[3])

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    model = locate("smollm2-135m")
    if model is None or ENVIRONMENT is None:
        pytest.skip("the default model is not there: run agentspec model fetch smollm2-135m")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with VllmServer(ENVIRONMENT, model.folder, log, None, {}, ("--enforce-eager",)) as started:
        yield started


def settings(url: str, threshold: float) -> Settings:
    endpoint = OpenAISettings(base_url=f"{url}/v1", model="model")  # type: ignore[arg-type]
    fast = SpecReasonSettings(
        base="base", small="small", threshold=threshold, think_start="", think_end="",
        budget_tokens=80, step_tokens=32,
    )  # fmt: skip
    return Settings(backends={"base": endpoint, "small": endpoint}, models={"fast": fast})


async def ask(runtime: Runtime, *, speculation: bool = True) -> tuple[str, StepSpeculation]:
    messages = [{"role": "user", "content": "A farmer has 15 sheep and buys 7 more. How many are there? Explain."}]
    request = GenerateRequest("fast", messages=messages, sampling=SamplingParams(temperature=0.0, max_tokens=100))
    deltas: list[Delta] = [delta async for delta in runtime.generate(replace(request, speculation=speculation))]
    told = deltas[-1].speculation
    assert isinstance(told, StepSpeculation) and told.degraded == {}
    return "".join(delta.extra.get("reasoning", "") for delta in deltas), told


async def test_above_nine_is_the_base_model_alone_and_scores_come_from_digits(server: VllmServer) -> None:
    async with Runtime(settings(server.url, 9.5)) as runtime:
        assert tokenization_of(runtime.backends()["base"]) is not None
        none, told = await ask(runtime)
        alone, _ = await ask(runtime, speculation=False)
    assert none == alone and none.strip() and told.proposed_steps == 0
    async with Runtime(settings(server.url, 0)) as runtime:
        kept, told = await ask(runtime)
    assert told.accepted_steps == told.proposed_steps and kept == alone  # the same model in both roles
