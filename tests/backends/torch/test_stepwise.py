"""Hidden states are what the head reads, and an answer made by steps is the engine's own, rewound or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.stepwise import StepOutput, TorchSteps
from agentspec.errors import InvalidRequestError, ShuttingDownError
from agentspec.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.anyio

TEXTS = ([72, 101, 108], [1], [5, 6, 7, 8, 9, 10, 11, 12])
TOLERANCE = 2e-4


@pytest.fixture
async def backend(saved_model: Path) -> AsyncIterator[TorchBackend]:
    backend = TorchBackend.load(TorchSettings(model=str(saved_model), device="cpu", max_draft_tokens=0))
    yield backend
    await backend.aclose()


def asked(**sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0} | sampling)
    return GenerateRequest("", text="Hello you", sampling=params)


async def test_hidden_states_are_those_of_the_model(backend: TorchBackend, saved_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(saved_model)
    for text, states in zip(TEXTS, await backend.hidden_states(TEXTS), strict=True):
        with torch.no_grad():
            own = module(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
        assert np.allclose(states, own.numpy(), atol=TOLERANCE)
    assert await backend.hidden_states([]) == []


def drawn(steps: TorchSteps) -> tuple[int, bool, StepOutput]:
    state = steps.advance()
    token = steps.draw(state.logits)
    return token, steps.add(token), state


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4}, {"frequency_penalty": 1.5}])
async def test_steps_make_the_answer_that_the_engine_makes(backend: TorchBackend, sampling: dict[str, Any]) -> None:
    expected = [token async for delta in backend.generate(asked(**sampling)) for token in delta.token_ids]
    session = await backend.open_steps(asked(**sampling))
    tokens, text, finish = list[int](), "", None
    while finish is None:
        token, over, _ = await session.run(drawn)
        tokens.append(token)
        delta = session.tell([token])
        text, finish = text + delta.text, delta.finish_reason
        assert over == (finish is not None)
    assert tokens == expected and text == backend.decode(tokens)
    assert delta.usage is not None and delta.usage.completion_tokens == len(tokens)


async def test_steps_after_a_rewind_are_equal_to_the_bit(backend: TorchBackend) -> None:
    session = await backend.open_steps(asked(temperature=1.0, seed=2, max_tokens=40))
    begun = await session.run(lambda steps: len(steps.tokens))
    first = [await session.run(drawn) for _ in range(10)]

    def astray(steps: TorchSteps) -> None:
        steps.rewind(begun + 3)
        for token in (7, 9):
            steps.add(token)
            steps.advance()
        steps.rewind(begun + 3)

    await session.run(astray)
    again = [await session.run(drawn) for _ in range(7)]
    assert [token for token, _, _ in again] == [token for token, _, _ in first[3:]]
    for (_, _, one), (_, _, other) in zip(first[3:], again, strict=True):
        assert one.logits.tobytes() == other.logits.tobytes() and one.hidden.tobytes() == other.hidden.tobytes()


async def test_stop_strings_cut_the_text_of_steps(backend: TorchBackend) -> None:
    session = await backend.open_steps(asked(stop=("lo",)))
    delta = session.tell(backend.encode("Hello world"))
    assert (delta.text, delta.finish_reason) == ("Hel", "stop")
    assert backend.decode(delta.token_ids) == "Hello"


@pytest.mark.parametrize("sampling", [{"n": 2}, {"logprobs": True}])
async def test_only_one_plain_answer_is_made_by_steps(backend: TorchBackend, sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        await backend.open_steps(asked(**sampling))


async def test_closing_fails_waiting_steps(backend: TorchBackend) -> None:
    session = await backend.open_steps(asked())
    await session.run(drawn)
    tasks = [asyncio.create_task(session.run(drawn)) for _ in range(50)]
    await asyncio.sleep(0)
    await backend.aclose()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(result, ShuttingDownError) for result in results)
    assert all(isinstance(result, (tuple, ShuttingDownError)) for result in results)
