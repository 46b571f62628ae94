from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.protocol.completions import CompletionWriter
from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.responses import BLOCK, Accumulator, Choice, clamped, obfuscated
from agentspec.protocol.wire import encode
from agentspec.types import Delta, GenerateRequest, SamplingParams, TokenLogprob, Usage


def test_an_answer_is_put_together_by_choice() -> None:
    answer = Accumulator()
    for delta in (Delta(text="a", token_ids=(1,)), Delta(text="x", index=1), Delta(text="b", finish_reason="stop")):
        answer.add(delta)
    answer.add(Delta(index=1, finish_reason="length", usage=Usage(1, 3)))
    first, second = (choice for _, choice in answer.all())
    assert ("".join(first.text), first.token_ids, first.finish_reason) == ("ab", [1], "stop")
    assert second.finish_reason == "length" and answer.usage == Usage(1, 3)


def test_pieces_of_tool_calls_become_whole_calls() -> None:
    pieces = [
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}},
        {"index": 0, "function": {"arguments": "}"}},
        {"index": 1, "id": "b", "function": {"name": "g"}},
    ]
    choice = Choice()
    for piece in pieces:
        choice.add(Delta(extra={"tool_calls": [piece]}))
    assert choice.extra["tool_calls"] == [
        {"id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "function": {"name": "g"}},
    ]


def test_pieces_are_joined_only_when_they_are_read() -> None:
    class Piece(str):
        def __radd__(self, before: str) -> str:
            raise AssertionError("each piece copies all before it")

    choice = Choice()
    choice.add(
        Delta(extra={"reasoning": "a", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]})
    )
    for _ in range(3):
        call = {"index": 0, "function": {"arguments": Piece("1")}}
        choice.add(Delta(extra={"reasoning": Piece("b"), "tool_calls": [call], "whole": {"n": 1}}))
    choice.add(Delta(extra={"whole": {"n": 2}}))
    called = [{"id": "a", "function": {"name": "f", "arguments": "{111"}}]
    assert choice.extra == {"reasoning": "abbb", "tool_calls": called, "whole": {"n": 2}}


def test_json_is_always_text() -> None:
    assert encode({"a": "é\ud800"}) == '{"a":"é?"}'.encode()
    with pytest.raises(ValueError):
        encode(float("inf"))
    assert clamped(float("-inf")) == -9999.0


def completion_writer(*, n: int = 1, logprobs: bool = True, **form: bool) -> CompletionWriter:
    request = GenerateRequest("m", text="p", sampling=SamplingParams(n=n, logprobs=logprobs))
    return CompletionWriter(request, AnswerFormat(**form))


@given(st.lists(st.lists(st.text(max_size=3), max_size=3), min_size=1, max_size=4))
def test_text_offsets_run_through_the_chunks(words: list[list[str]]) -> None:
    writing = completion_writer()
    whole, answer, offsets = "", Accumulator(), []
    for group in words:
        delta = Delta(text="".join(group), logprobs=tuple(TokenLogprob(0, word, -1.0) for word in group))
        answer.add(delta)
        for chunk in writing.chunks(delta):
            offsets += chunk["choices"][0]["logprobs"]["text_offset"]
        whole += delta.text
    tokens = [word for group in words for word in group]
    assert offsets == [sum(len(word) for word in tokens[:i]) for i in range(len(tokens))]
    body = completion_writer().body(answer)
    assert body["choices"][0]["text"] == whole and body["choices"][0]["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("length", [0, 1, 100, BLOCK - 30, BLOCK - 29, BLOCK - 28, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("text", ["x", "é", "\n"])
def test_events_are_filled_to_whole_blocks(length: int, text: str) -> None:
    data = obfuscated({"a": text * length})
    read = json.loads(data)
    assert len(data) % BLOCK == 0 and read.pop("obfuscation") is not None and read == {"a": text * length}


def test_filling_is_random() -> None:
    assert obfuscated({"a": 1}) != obfuscated({"a": 1})
