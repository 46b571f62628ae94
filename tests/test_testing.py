from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest, SamplingParams

pytestmark = pytest.mark.anyio


def ask(text: str = "a question", *, speculation: bool = True, **sampling: object):
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return GenerateRequest(model="m", text=text, sampling=params, speculation=speculation)


async def collect(backend: FakeBackend, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in backend.generate(request)]


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_max_tokens_stop_ids_and_logprobs() -> None:
    backend = FakeBackend("one two three four")
    cut = await collect(backend, ask(max_tokens=2))
    assert joined(cut) == "one two" and cut[-1].finish_reason == "length"
    three = backend.encode(" three")[0]
    assert joined(await collect(backend, ask(stop_token_ids=(three,)))) == "one two"
    with_logprobs = await collect(backend, ask(logprobs=True, top_logprobs=1))
    assert [entry.text for delta in with_logprobs for entry in delta.logprobs] == ["one", " two", " three", " four"]
    assert with_logprobs[0].logprobs[0].top[0].text == "one"


@given(text=st.text(alphabet="ab ", max_size=30), stop=st.text(alphabet="ab ", min_size=1, max_size=3))
def test_stop_strings_end_the_answer_before_them(text: str, stop: str) -> None:
    deltas = anyio.run(collect, FakeBackend(text), ask(stop=(stop,)))
    at = text.find(stop)
    assert joined(deltas) == (text if at < 0 else text[:at])
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == sum(1 for delta in deltas if delta.token_ids)
