from __future__ import annotations

from typing import Any

from agentspec.protocol.chat_response import ChatWriter
from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.responses import Accumulator, encode
from agentspec.types import Delta, GenerateRequest, Prompt, SamplingParams, Speculation, TokenLogprob, Usage

DELTAS = [
    Delta(),
    Delta(text="a", logprobs=(TokenLogprob(1, "a", -0.5, (TokenLogprob(2, "é", float("-inf")),)),)),
    Delta(text="b"),
    Delta(token_ids=(3,)),
    Delta(text="c", finish_reason="length", usage=Usage(2, 3, 1, 4, 0), speculation=Speculation(5, 2, 1, 0.25)),
]


def writer(*, n: int = 1, logprobs: bool = True, speculation: bool = True, **form: bool) -> ChatWriter:
    request = GenerateRequest("m", messages=[], sampling=SamplingParams(n=n, logprobs=logprobs))
    return ChatWriter(request, AnswerFormat(**form), speculation)


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


def test_the_speculation_object_can_be_switched_off() -> None:
    assert not any("speculation" in chunk for chunk in chunks(speculation=False, usage=True))


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
