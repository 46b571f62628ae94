from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage

from agentspec.errors import InvalidRequestError
from agentspec.langchain.messages import AnswerChunks, to_message, to_openai, to_tool_choice, usage_of
from agentspec.protocol.deltas import UNKNOWN_TOKEN
from agentspec.protocol.responses import whole_arguments
from agentspec.types import Delta, TokenLogprob, Usage


def test_messages_as_openai_takes_them() -> None:
    call: Any = {"name": "f", "args": {"x": 1}, "id": "c1", "type": "tool_call"}
    thoughts = [{"type": "reasoning", "reasoning": "hmm"}, {"type": "text", "text": "said"}]
    converted = to_openai(
        [
            SystemMessage("be brief"),
            HumanMessage([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
            AIMessage(content="", tool_calls=[call]),
            ToolMessage("7", tool_call_id="c1"),
            AIMessage(content=thoughts),  # type: ignore[arg-type]
        ]
    )
    assert [message["role"] for message in converted] == ["system", "user", "assistant", "tool", "assistant"]
    assert converted[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert converted[3]["tool_call_id"] == "c1"
    assert "hmm" not in str(converted) and "said" in str(converted[4]["content"])


def test_a_token_that_an_endpoint_names_by_its_text_alone_has_no_id() -> None:
    delta = Delta("a", logprobs=(TokenLogprob(UNKNOWN_TOKEN, "a", -0.5), TokenLogprob(7, "b", -1.0)))
    without, with_id = AnswerChunks("m").chunk(delta).response_metadata["logprobs"]["content"]
    assert "token_id" not in without and with_id["token_id"] == 7


def test_calls_whose_arguments_are_no_json_go_back_as_they_came() -> None:
    call: Any = {"name": "f", "args": {"x": 1}, "id": "c1", "type": "tool_call"}
    broken: Any = {"name": "g", "args": '{"x": ', "id": "c2", "error": "no JSON", "type": "invalid_tool_call"}
    empty: Any = {"name": None, "args": None, "id": None, "error": "cut", "type": "invalid_tool_call"}
    both, alone, cut = to_openai(
        [
            AIMessage("", tool_calls=[call], invalid_tool_calls=[broken]),
            AIMessage("said", invalid_tool_calls=[broken]),
            AIMessage("", invalid_tool_calls=[empty]),
        ]
    )
    assert [one["id"] for one in both["tool_calls"]] == ["c1", "c2"]
    assert both["tool_calls"][1] == {"type": "function", "id": "c2", "function": {"name": "g", "arguments": '{"x": '}}
    assert (alone["content"], len(alone["tool_calls"])) == ("said", 1)
    assert cut["tool_calls"] == [{"type": "function", "id": None, "function": {"name": "", "arguments": ""}}]


@given(st.lists(st.text(max_size=5), min_size=1, max_size=6), st.integers(0, 5))
def test_chunks_add_up_to_the_text(texts: list[str], tokens: int) -> None:
    deltas = [*(Delta(text=text) for text in texts), Delta(finish_reason="stop", usage=Usage(3, tokens))]
    chunks = [*map(AnswerChunks("m").chunk, deltas)]
    whole = chunks[0] + chunks[1:]
    assert isinstance(whole, AIMessageChunk)
    assert whole.content == "".join(texts)
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == tokens
    assert whole.response_metadata == {"finish_reason": "stop", "model_name": "m", "model_provider": "agentspec"}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_under_either_name(name: str) -> None:
    chunks = AnswerChunks("m")
    whole = chunks.chunk(Delta(extra={name: "a ", "refusal": "r"})) + chunks.chunk(Delta(extra={name: "b"}))
    assert whole.additional_kwargs == {"reasoning_content": "a b", "refusal": "r"}


def test_whole_tool_calls_without_an_index() -> None:
    calls = [{"id": str(number), "function": {"name": f"f{number}", "arguments": "{}"}} for number in range(2)]
    chunk = AnswerChunks("m").chunk(Delta(extra={"tool_calls": calls}, finish_reason="tool_calls"))
    assert [call["name"] for call in chunk.tool_calls] == ["f0", "f1"]


_JSON = st.text(alphabet='{}[]",:\\a1 \n', max_size=12) | st.dictionaries(st.text(max_size=3), st.integers()).map(
    json.dumps
)


@given(_JSON, st.integers(0, 12), st.sampled_from(["tool_calls", "length", "cancelled", "content_filter"]))
def test_arguments_that_are_no_whole_object_make_an_invalid_call(said: str, at: int, finish: Any) -> None:
    head = {"index": 0, "id": "c", "function": {"name": "f", "arguments": said[:at]}}
    rest = {"index": 0, "function": {"arguments": said[at:]}}
    chunks = AnswerChunks("m")
    parts = [chunks.chunk(Delta(extra={"tool_calls": [head]})), chunks.chunk(Delta(extra={"tool_calls": [rest]}))]
    parts.append(chunks.chunk(Delta(finish_reason=finish)))
    together = AnswerChunks("m").chunk(Delta(extra={"tool_calls": [head, rest]}, finish_reason=finish))
    whole = whole_arguments(said, finish)
    for message in (parts[0] + parts[1:], to_message(parts), together, to_message([together])):
        assert [call["args"] for call in message.tool_calls] == ([] if whole is None else [whole])
        assert len(message.invalid_tool_calls) == (whole is None)
        (sent,) = to_openai([message])
        assert whole is not None or sent["tool_calls"][0]["function"]["arguments"] == said


def test_thoughts_are_counted_apart() -> None:
    chunk = AnswerChunks("m").chunk(Delta(finish_reason="stop", usage=Usage(3, 9, reasoning_tokens=7)))
    assert chunk.usage_metadata is not None
    assert chunk.usage_metadata.get("output_token_details") == {"reasoning": 7}
    assert usage_of(AIMessage("x", usage_metadata=chunk.usage_metadata)) == Usage(3, 9, reasoning_tokens=7)


def test_the_log_probability_of_half_a_character() -> None:
    chunk = AnswerChunks("m").chunk(Delta(text="\ud83d", logprobs=(TokenLogprob(1, "\ud83d", -0.5),)))
    assert chunk.response_metadata["logprobs"]["content"][0]["bytes"] == [0xED, 0xA0, 0xBD]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (True, "required"),
        ("any", "required"),
        ("none", "none"),
        ("f", {"type": "function", "function": {"name": "f"}}),
        ({"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choices(choice: Any, wanted: Any) -> None:
    assert to_tool_choice(choice, ["f"]) == wanted


@pytest.mark.parametrize("choice", ["g", {"type": "function", "function": {"name": "g"}}])
def test_tool_choice_of_no_tool(choice: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'g'"):
        to_tool_choice(choice, ["f"])
