from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.protocol.completions import CompletionWriter
from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.responses import BLOCK, Accumulator, ChatWriter, Choice, clamped, obfuscated
from agentspec.protocol.wire import encode
from agentspec.types import Delta, GenerateRequest, Prompt, SamplingParams, Speculation, TokenLogprob, Usage


def test_an_answer_is_put_together_by_choice() -> None:
    answer = Accumulator()
    for delta in (Delta(text="a", token_ids=(1,)), Delta(text="x", index=1), Delta(text="b", finish_reason="stop")):
        answer.add(delta)
    answer.add(Delta(index=1, finish_reason="length", usage=Usage(1, 3)))
    first, second = (choice for _, choice in answer.all())
    assert ("".join(first.text), first.token_ids, first.finish_reason) == ("ab", [1], "stop")
    assert second.finish_reason == "length" and answer.usage == Usage(1, 3)


def test_an_answer_without_deltas_has_an_empty_choice() -> None:
    assert Accumulator().all() == [(0, Choice())]


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


DELTAS = [
    Delta(),
    Delta(text="a", logprobs=(TokenLogprob(1, "a", -0.5, (TokenLogprob(2, "é", float("-inf")),)),)),
    Delta(text="b"),
    Delta(token_ids=(3,)),
    Delta(text="c", finish_reason="length", usage=Usage(2, 3, 1, 4, 0), speculation=Speculation(5, 2, 1, 0.25)),
]


def writer(*, n: int = 1, logprobs: bool = True, **form: bool) -> ChatWriter:
    request = GenerateRequest("m", messages=[], sampling=SamplingParams(n=n, logprobs=logprobs))
    return ChatWriter(request, AnswerFormat(**form))


def chunks(**switches: bool) -> list[dict[str, Any]]:
    written = writer(**switches)
    return [chunk for delta in DELTAS for chunk in written.chunks(delta)]


def test_chunks_share_their_head_and_begin_with_the_role() -> None:
    written = chunks()
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in written}) == 1
    assert written[0]["object"] == "chat.completion.chunk" and written[0]["id"].startswith("chatcmpl-")
    deltas = [chunk["choices"][0]["delta"] for chunk in written]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[1:] == [{"content": c} for c in "abc"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in written] == [None, None, None, "length"]
    assert all("usage" not in chunk for chunk in written) and written[-1]["speculation"]["drafted"] == 5


def test_usage_comes_on_a_chunk_of_its_own() -> None:
    written = chunks(usage=True)
    assert [chunk["usage"] for chunk in written[:-1]] == [None] * 4
    assert written[-1]["choices"] == [] and "speculation" not in written[-2]
    assert written[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 0},
    }
    assert written[-1]["speculation"] == {"drafted": 5, "accepted": 2, "steps": 1, "estimated_seconds_saved": 0.25}


def test_the_whole_answer_is_the_sum_of_its_chunks() -> None:
    answer = Accumulator()
    for delta in DELTAS:
        answer.add(delta)
    body = writer().body(answer)
    [choice] = body["choices"]
    assert body["object"] == "chat.completion" and choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert choice["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "é", "logprob": -9999.0, "bytes": [195, 169]}],
        }
    ]
    encode(body)


def call(index: int, **more: Any) -> dict[str, Any]:
    return {"index": index, **more}


SEVERAL = [
    Delta(
        text="a",
        token_ids=(5,),
        prompt=Prompt("p", (1, 2), (TokenLogprob(2, "p", -1.0, (TokenLogprob(3, "q", -0.5, (), 1),), 2),)),
    ),
    Delta(index=1, extra={"reasoning": "h", "reasoning_content": "h"}),
    Delta(index=1, extra={"reasoning": "m", "reasoning_content": "m"}),
    Delta(index=1, extra={"tool_calls": [call(0, id="c", type="function", function={"name": "f", "arguments": "{"})]}),
    Delta(text="b", token_ids=(6,), finish_reason="stop"),
    Delta(index=1, extra={"tool_calls": [call(0, function={"arguments": "}"})]}),
    Delta(index=1, finish_reason="tool_calls", usage=Usage(2, 7)),
]


def test_several_choices_end_one_by_one_and_are_counted_at_the_last_end() -> None:
    writing = writer(n=2, logprobs=False, usage=True, token_ids=True)
    written = [chunk for delta in SEVERAL for chunk in writing.chunks(delta)]
    choices = [chunk["choices"][0] for chunk in written if chunk["choices"]]
    assert [choice["index"] for choice in choices] == [0, 1, 1, 1, 0, 1, 1]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", "assistant", *[None] * 5]
    assert written[0]["prompt_token_ids"] == [1, 2] and choices[0]["token_ids"] == [5]
    assert "prompt_token_ids" not in written[1]
    assert [chunk["usage"] is not None for chunk in written] == [*[False] * 7, True]


def test_a_whole_answer_of_several_choices() -> None:
    answer = Accumulator()
    for delta in SEVERAL:
        answer.add(delta)
    body = writer(n=2, logprobs=False, token_ids=True).body(answer)
    first, second = body["choices"]
    assert first["message"]["content"] == "ab" and first["token_ids"] == [5, 6]
    assert second["message"]["content"] is None and second["finish_reason"] == "tool_calls"
    assert second["message"]["reasoning"] == second["message"]["reasoning_content"] == "hm"
    assert second["message"]["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]
    assert body["prompt_token_ids"] == [1, 2]
    assert body["prompt_logprobs"] == [
        None,
        {
            "3": {"logprob": -0.5, "rank": 1, "decoded_token": "q"},
            "2": {"logprob": -1.0, "rank": 2, "decoded_token": "p"},
        },
    ]
    encode(body)


ECHOED = Prompt("a bc", (1, 2, 3), (TokenLogprob(2, " b", -1.0), TokenLogprob(3, "c", -2.0)))
COMPLETED = [
    Delta(text="x", token_ids=(7,), logprobs=(TokenLogprob(7, "x", -0.5),), prompt=ECHOED),
    Delta(text="y", token_ids=(8,), logprobs=(TokenLogprob(8, "y", -0.5),), index=1, finish_reason="length"),
    Delta(text="z", token_ids=(9,), logprobs=(TokenLogprob(9, "z", -0.5),), finish_reason="stop", usage=Usage(3, 3)),
]


def completion_writer(*, n: int = 1, logprobs: bool = True, **form: bool) -> CompletionWriter:
    request = GenerateRequest("m", text="p", sampling=SamplingParams(n=n, logprobs=logprobs))
    return CompletionWriter(request, AnswerFormat(**form))


def test_an_echoed_prompt_stands_before_every_choice() -> None:
    form = {"usage": True, "token_ids": True, "echo": True}
    answer, streaming = Accumulator(), completion_writer(n=2, **form)
    for delta in COMPLETED:
        answer.add(delta)
    whole = completion_writer(n=2, **form).body(answer)["choices"]
    streamed = [chunk["choices"][0] for delta in COMPLETED for chunk in streaming.chunks(delta) if chunk["choices"]]
    assert [choice["text"] for choice in whole] == ["a bcxz", "a bcy"]
    assert [choice["text"] for choice in streamed] == ["a bcx", "a bcy", "z"]
    assert whole[0]["logprobs"]["tokens"] == ["a", " b", "c", "x", "z"]
    assert whole[0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -0.5, -0.5]
    assert whole[0]["logprobs"]["text_offset"] == [0, 1, 3, 4, 5]
    assert streamed[2]["logprobs"]["text_offset"] == [5] and streamed[1]["logprobs"]["text_offset"] == [0, 1, 3, 4]
    assert whole[0]["token_ids"] == [7, 9] and whole[1]["prompt_token_ids"] == [1, 2, 3]
    encode(whole)


def test_prompt_logprobs_stand_on_the_choice() -> None:
    answer = Accumulator()
    for delta in COMPLETED[:1]:
        answer.add(delta)
    [choice] = completion_writer(logprobs=False, usage=True, prompt_logprobs=True).body(answer)["choices"]
    assert choice["text"] == "x" and choice["logprobs"] is None
    assert [entry and list(entry) for entry in choice["prompt_logprobs"]] == [None, ["2"], ["3"]]


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


def test_chunks() -> None:
    writing = completion_writer(logprobs=False, usage=True)
    written = [*writing.chunks(Delta()), *writing.chunks(Delta(text="a", finish_reason="stop", usage=Usage(1, 1)))]
    assert [chunk["object"] for chunk in written] == ["text_completion"] * 2
    assert written[0]["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}]
    assert written[1]["choices"] == [] and written[1]["usage"]["total_tokens"] == 2
    encode(written)


@pytest.mark.parametrize("length", [0, 1, 100, BLOCK - 30, BLOCK - 29, BLOCK - 28, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("text", ["x", "é", "\n"])
def test_events_are_filled_to_whole_blocks(length: int, text: str) -> None:
    data = obfuscated({"a": text * length})
    read = json.loads(data)
    assert len(data) % BLOCK == 0 and read.pop("obfuscation") is not None and read == {"a": text * length}


def test_filling_is_random() -> None:
    assert obfuscated({"a": 1}) != obfuscated({"a": 1})
