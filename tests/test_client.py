"""`generate` and `chat`: one line from an answer, here of a gateway; docs/quickstart.md runs them in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import pytest

import agentspec
from agentspec import ConfigurationError, InvalidRequestError, UpstreamStatusError
from agentspec.langchain import ChatAgentSpec
from agentspec.settings.server import ApiKey
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Labels
from tests.proxy.conftest import run_gateway, wait_for

pytestmark = pytest.mark.anyio


@pytest.fixture
def served() -> Iterator[tuple[dict[str, Any], FakeBackend]]:
    """What names a gateway, and the backend behind it."""
    fake = FakeBackend("an answer in pieces")
    with run_gateway({"fake": fake}) as running:
        yield {"model": "fake", "base_url": f"{running.url}/v1"}, fake


def test_an_answer_is_whole_or_in_pieces_and_is_counted(served: Any) -> None:
    there, fake = served
    agentspec.report().reset()
    with agentspec.workflow("trip", session="s"):
        whole = agentspec.generate("once", **there, temperature=0.5, max_tokens=3, stop="x", seed=7)
        pieces = list(agentspec.generate("once", **there, stream=True, speculation=False, session="t"))
    assert whole == "an answer in" and len(pieces) > 1 and "".join(pieces) == "an answer in pieces"
    first, second = fake.requests
    assert (first.text, first.labels, second.labels) == ("once", Labels("s", "trip"), Labels("t", "trip"))
    got = first.sampling
    assert (got.temperature, got.max_tokens, got.stop, got.seed) == (0.5, 3, ("x",), 7)
    assert (first.speculation, second.speculation) == (True, False)
    assert [(row.workflow, row.calls, row.completion_tokens) for row in agentspec.report()] == [("trip", 2, 7)]


async def test_chats_of_both_kinds_of_callers(served: Any) -> None:
    there, fake = served
    said = [{"role": "user", "content": "hi"}]
    answers = [agentspec.chat("hi", **there), "".join(agentspec.chat(said, **there, stream=True))]
    answers += [await agentspec.achat(said, **there), await agentspec.agenerate("hi", **there)]
    pieces: AsyncIterator[str] = await agentspec.achat("hi", **there, stream=True)
    answers.append("".join([piece async for piece in pieces]))
    assert answers == ["an answer in pieces"] * 5
    assert [request.messages for request in fake.requests if request.messages] == [said] * 4


def test_leaving_a_stream_cancels_the_work() -> None:
    fake = FakeBackend(Answer("one two three four", latency=0.05))
    with run_gateway({"fake": fake}) as running:
        pieces: Any = agentspec.generate("hi", model="fake", base_url=f"{running.url}/v1", stream=True)
        with closing(pieces):
            assert next(pieces) == "one"
        wait_for(lambda: fake.cancelled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tempreature": 0}, "did you mean 'temperature'?"),
        ({"max_tokens": -1}, "max_tokens must lie between 0 and"),
        ({"n": 2}, "n: generate and chat give one answer"),
        ({"tools": [{"type": "function"}]}, "use ChatAgentSpec"),
        ({"base_url": "127.0.0.1:8700/v1"}, "must begin with http"),
        ({"messages": [{"role": "nobody", "content": "hi"}]}, r"messages\[0\]"),
        ({"session": 5}, "session must be a text"),
        ({"store": "no"}, "store must be true or false"),
        ({"speculation": "off"}, "speculation must be true or false"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(served: Any, options: dict[str, Any], message: str) -> None:
    there, fake = served
    messages = options.pop("messages", "hi")
    with pytest.raises((InvalidRequestError, ConfigurationError, UpstreamStatusError), match=message):
        agentspec.chat(messages, **{**there, **options})
    assert not fake.requests


@pytest.mark.parametrize("given", [{"api_key": "right"}, {}])
def test_a_key_is_given_or_in_the_environment(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "right")
    monkeypatch.setenv("AGENTSPEC_API_KEY", "wrong" if given else "right")
    with run_gateway({"fake": FakeBackend()}, api_keys=(ApiKey(key_env="KEY"),)) as running:
        assert agentspec.chat("hi", model="fake", base_url=f"{running.url}/v1", **given) == "ok"


def test_an_address_without_v1_is_named(served: Any) -> None:
    there, _ = served
    root = there["base_url"].removesuffix("/v1")
    with pytest.raises(UpstreamStatusError, match="base_url should end in /v1"):
        agentspec.chat("hi", model="fake", base_url=root)
    with pytest.raises(UpstreamStatusError, match="base_url should end in /v1"):
        ChatAgentSpec(model="fake", base_url=f"{root}/").invoke("hi")
