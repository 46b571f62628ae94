"""The default model itself: exactness on and off, reuse, and text. Slower than the rest, hence few and short."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

from agentspec.backends.model_store import ModelFiles
from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.exactness import ExactnessCase, check_exactness
from agentspec.backends.torch.model.layers import HalfLinear
from agentspec.cache import SuffixCache
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.types import Delta, GenerateRequest, SamplingParams, StructuredOutputs

pytestmark = [pytest.mark.anyio, pytest.mark.model]


@pytest.fixture(scope="module")
def backend(default_model: ModelFiles) -> Any:
    cache = SuffixCache.open()
    backend = TorchBackend.load(TorchSettings(model="smollm2-135m", device="cpu"), cache=cache)
    yield backend
    asyncio.run(backend.aclose())
    cache.close()


async def answer(backend: TorchBackend, prompt: str, sampling: SamplingParams, **fields: Any) -> tuple[str, Delta]:
    messages = [{"role": "user", "content": prompt}]
    deltas = [delta async for delta in backend.generate(GenerateRequest("m", messages, sampling=sampling, **fields))]
    return "".join(delta.text for delta in deltas), deltas[-1]


async def test_the_model_is_packed_and_knows_its_end(backend: TorchBackend) -> None:
    target = backend.target
    assert sum(isinstance(module, HalfLinear) for module in target.module.modules()) == 211
    assert target.attention == "agentspec_grouped" and target.dtype == torch.float32
    short = SamplingParams(temperature=0.0, max_tokens=40)
    text, last = await answer(backend, "What is the capital of France? Answer in one sentence.", short)
    assert "Paris" in text and last.finish_reason == "stop"


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.long)])
async def test_answers_are_those_without_speculation(backend: TorchBackend, count: int) -> None:
    pairs = zip(load_prompts("edit_short"), load_prompts("control"), strict=False)
    prompts = [backend.encode_chat([{"role": "user", "content": text}]) for pair in pairs for text in pair]
    ways = (SamplingParams(temperature=0.0, max_tokens=6), SamplingParams(temperature=0.8, max_tokens=6, seed=1))
    questions = [ExactnessCase(prompt, ways[number // 2 % 2]) for number, prompt in enumerate(prompts[:count])]
    found = await check_exactness(backend, questions, lambda line: None)
    assert found.exact, found.divergences


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "married"],
}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.long), 0.0])
async def test_a_json_schema_holds_on_and_off(backend: TorchBackend, temperature: float) -> None:
    sampling = SamplingParams(
        temperature=temperature, seed=3, max_tokens=80, structured_outputs=StructuredOutputs(json=PERSON)
    )
    prompt = "Describe Ann from Rome, 31 years old, as JSON."
    off, _ = await answer(backend, prompt, sampling, speculation=False, store=False)
    for _ in range(2):
        on, last = await answer(backend, prompt, sampling)
        assert on == off and last.finish_reason == "stop"
    person = json.loads(on)
    assert list(person) == list(PERSON["properties"]) and 0 <= person["age"] <= 150
    assert last.speculation is not None and last.speculation.steps < last.usage.completion_tokens
