"""LangChain's model for OpenAI with `use_responses_api`, against a gateway."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest

pytestmark = pytest.mark.slow


class Weather(BaseModel):
    degrees: int


@tool
def temperature(place: str) -> str:
    """The temperature of a place."""
    return "21"


def script(request: GenerateRequest) -> Any:
    if request.sampling.structured_outputs is not None:
        return '{"degrees": 21}'
    if request.tools and not any(message["role"] == "tool" for message in request.messages or ()):
        function = {"name": "temperature", "arguments": '{"place": "Rome"}'}
        calls = [{"index": 0, "id": "c1", "type": "function", "function": function}]
        return Answer("", extra={"reasoning_content": "hm", "tool_calls": calls}, finish_reason="tool_calls")
    return "It has 21 degrees."


@pytest.fixture(scope="module")
def chat(shared_gateway: Any) -> ChatOpenAI:
    url = f"{shared_gateway({'fake': FakeBackend(script)}).url}/v1"
    return ChatOpenAI(model="fake", base_url=url, api_key=SecretStr("none"), use_responses_api=True)


def test_text_streamed_and_whole(chat: ChatOpenAI) -> None:
    whole = chat.invoke("how warm?")
    assert whole.text == "It has 21 degrees." == "".join(chunk.text for chunk in chat.stream("how warm?"))
    assert whole.usage_metadata and whole.usage_metadata["output_tokens"] == 4


def test_a_tool_loop(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([temperature])
    asked = HumanMessage("how warm?")
    for first in (bound.invoke([asked]), sum_chunks(bound, asked)):
        assert first.tool_calls[0]["args"] == {"place": "Rome"}
        result = ToolMessage(temperature.invoke(first.tool_calls[0]["args"]), tool_call_id=first.tool_calls[0]["id"])
        assert bound.invoke([asked, first, result]).text == "It has 21 degrees."


def sum_chunks(bound: Any, asked: HumanMessage) -> AIMessage:
    chunks = list(bound.stream([asked]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


def test_structured_output(chat: ChatOpenAI) -> None:
    assert chat.with_structured_output(Weather).invoke("how warm?") == Weather(degrees=21)


def test_a_conversation_by_id(chat: ChatOpenAI) -> None:
    first = chat.invoke("one")
    again = chat.invoke("two", previous_response_id=first.response_metadata["id"])
    assert again.text == "It has 21 degrees."
