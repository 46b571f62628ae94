"""How many tokens messages have, by the tokenizer of the model that would answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.tools import tool
from pydantic import HttpUrl

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.background import call_sync
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.langchain import ChatAgentSpec
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import FakeBackend
from agentspec.types import Message

SAID: list[BaseMessage] = [
    SystemMessage("be brief"),
    HumanMessage("one two three"),
    AIMessage("four five"),
    HumanMessage("six"),
]


@tool
def look(place: str) -> str:
    """Look at a place."""
    return place


class Strict(FakeBackend):
    """Its template wants a user's message first, as many do."""

    async def render(self, messages: Sequence[Message], *given: Any, **further: Any) -> str:
        if messages[0]["role"] not in ("system", "user"):
            raise InvalidRequestError("the chat template refuses these messages", param="messages")
        return await super().render(messages, *given, **further)


@contextmanager
def started(settings: Settings) -> Iterator[Runtime]:
    """A runtime that is closed again: an engine's thread, and what looks after a pool, would go on."""
    runtime = Runtime(settings)
    try:
        yield runtime
    finally:
        call_sync(runtime.aclose)


def chat(fake: FakeBackend, **options: Any) -> ChatAgentSpec:
    return ChatAgentSpec(model="fake", runtime=Runtime(backends={"fake": fake}), **options)


def prompt_tokens(model: Any, messages: list[BaseMessage]) -> int:
    return int(model.invoke(messages).usage_metadata["input_tokens"])


def test_a_local_model_counts_what_its_answers_report(tiny_model: Path) -> None:
    settings = Settings(backends={"tiny": TorchSettings(model=str(tiny_model), max_active=1)})
    with started(settings) as runtime:
        model = ChatAgentSpec(model=str(tiny_model), runtime=runtime, max_tokens=1)
        assert model.get_num_tokens_from_messages(SAID) == prompt_tokens(model, SAID)
        with_tools = model.get_num_tokens_from_messages(SAID, tools=[look])
        assert with_tools == prompt_tokens(model.bind_tools([look]), SAID) > prompt_tokens(model, SAID)
        assert len(model.get_token_ids("añb")) == model.get_num_tokens("añb") == 4  # its tokens are bytes
        assert model.get_token_ids("") == []


def test_trimming_counts_a_part_of_a_chat_that_the_template_refuses_as_a_little_more() -> None:
    """`trim_messages` asks for the newest messages, the newest first: here a result, its call, and an answer."""
    call: Any = {"name": "look", "args": {"place": "here"}, "id": "c1", "type": "tool_call"}
    part = [ToolMessage("seen", tool_call_id="c1"), AIMessage("", tool_calls=[call]), AIMessage("four five")]
    strict, lenient = chat(Strict()), chat(FakeBackend())
    newest, most = SAID[-1:], lenient.get_num_tokens_from_messages(SAID[-1:])
    assert trim_messages(SAID, max_tokens=most, token_counter=lenient) == newest
    assert strict.get_num_tokens_from_messages(SAID) == lenient.get_num_tokens_from_messages(SAID)
    assert strict.get_num_tokens_from_messages(part) >= lenient.get_num_tokens_from_messages(part)
    assert len(trim_messages(SAID, max_tokens=30, token_counter=strict)) == 4


def test_the_tokenizer_of_a_gateway_or_of_one_server_of_a_pool_is_asked(gateway: tuple[str, FakeBackend]) -> None:
    url, fake = gateway
    settings = Settings(
        backends={"up": OpenAISettings(base_urls=(HttpUrl(url),))},
        models={"pooled": ModelSettings(backend="up", upstream_model="fake")},
    )
    with started(settings) as runtime:
        assert ChatAgentSpec(model="pooled", runtime=runtime).get_token_ids("one two") == fake.encode("one two")
    remote = ChatAgentSpec(model="fake", base_url=url)
    assert remote.get_num_tokens_from_messages(SAID) == chat(FakeBackend()).get_num_tokens_from_messages(SAID)
    assert remote.get_token_ids("one two") == fake.encode("one two")


@pytest.mark.parametrize("status", [404, 405, 501])
def test_an_endpoint_without_a_tokenizer(server: Any, status: int) -> None:
    model = ChatAgentSpec(model="m", base_url=server.base_url)
    server.failures += [status, status]
    for count in (lambda: model.get_num_tokens("one"), lambda: model.get_num_tokens_from_messages(SAID)):
        with pytest.raises(ConfigurationError, match=f"{status}.*custom_get_token_ids"):
            count()


def test_an_encoder_of_the_users_own_comes_first(server: Any) -> None:
    model = ChatAgentSpec(model="m", base_url=server.base_url, custom_get_token_ids=lambda text: [*text.encode()])
    assert model.get_token_ids("ab") == [97, 98]
    plain = model.get_num_tokens_from_messages(SAID)
    assert plain == len("System: be brief" + "Human: one two three" + "AI: four five" + "Human: six")
    assert model.get_num_tokens_from_messages(SAID, tools=[look]) > plain + len("Look at a place.")
    assert not server.bodies
