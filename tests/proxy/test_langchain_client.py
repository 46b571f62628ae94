"""`langchain-openai` pointed at the gateway, unmodified."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import Settings
from agentspec.testing import FakeBackend

langchain_openai = pytest.importorskip("langchain_openai")


@pytest.fixture(params=["backend", "upstream"])
def chat(gateway: Any, request: pytest.FixtureRequest) -> Any:
    """On a gateway in front of a backend, and on one more gateway, to which that one is the upstream."""
    running = gateway({"fake": FakeBackend("brave new wörld")})
    if request.param == "upstream":
        upstream: Any = OpenAISettings(base_url=f"{running.url}/v1")  # type: ignore[arg-type]
        running = gateway({}, Settings(backends={"up": upstream}))
    return langchain_openai.ChatOpenAI(
        model="fake", base_url=f"{running.url}/v1", api_key=SecretStr("none"), max_retries=0, stream_usage=True
    )


def test_invoke(chat: Any) -> None:
    answer = chat.invoke([("system", "be short"), ("human", "hi")])
    assert answer.content == "brave new wörld"
    assert answer.usage_metadata["input_tokens"] == 3 and answer.usage_metadata["output_tokens"] == 3
    assert answer.response_metadata["model_name"] == "fake" and answer.response_metadata["finish_reason"] == "stop"


def test_stream(chat: Any) -> None:
    chunks = list(chat.stream("hi", stop=["nothing"], temperature=0.0, max_tokens=9, seed=3))
    assert [chunk.content for chunk in chunks if chunk.content] == ["brave", " new", " wörld"]
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata["total_tokens"] == 4


@pytest.mark.anyio
async def test_async(chat: Any) -> None:
    assert (await chat.ainvoke("hi")).content == "brave new wörld"
    assert "".join([chunk.content async for chunk in chat.astream("hi")]) == "brave new wörld"
