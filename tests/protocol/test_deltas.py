from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import UpstreamError
from agentspec.protocol.deltas import merged, read_usage, to_delta
from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.responses import Accumulator, ChatWriter, speculation_member, usage_object
from agentspec.protocol.speculation import (
    KnnSpeculation,
    RetrievalSpeculation,
    StepSpeculation,
    read_speculation,
    summed,
)
from agentspec.protocol.tools import CallNumbers
from agentspec.protocol.wire import encode
from agentspec.types import Delta, GenerateRequest, SamplingParams, Speculation, TokenLogprob, Usage

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_a_chunk_with_everything() -> None:
    token = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2.0}]}
    delta = {"role": "assistant", "content": "a", "reasoning": "why", "tool_calls": [{"index": 0}], "refusal": None}
    counts = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 0},
    }
    chunk = {
        "choices": [
            {"index": 1, "delta": {"content": "another choice"}},
            {"index": 0, "delta": delta, "token_ids": [5], "finish_reason": "length", "logprobs": {"content": [token]}},
        ],
        "usage": counts,
        "speculation": {"drafted": 4, "accepted": 2, "steps": 1, "estimated_seconds_saved": 0.5},
    }
    assert to_delta(chunk) == Delta(
        text="a",
        token_ids=(5,),
        logprobs=(TokenLogprob(-1, "a", -1.0, (TokenLogprob(-1, "b", -2.0),)),),
        finish_reason="length",
        usage=Usage(3, 2, 1, 1, 0),
        speculation=Speculation(4, 2, 1, 0.5),
        extra={"reasoning": "why", "tool_calls": [{"index": 0}]},
    )


def test_completion_chunks_and_whole_answers() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [{"b": -1.0}]}
    chunk = {"choices": [{"text": "a", "logprobs": logprobs, "finish_reason": None}]}
    assert to_delta(chunk) == Delta(text="a", logprobs=(TokenLogprob(-1, "a", 0.0, (TokenLogprob(-1, "b", -1.0),)),))
    assert to_delta({"choices": [{"message": {"content": "whole"}, "finish_reason": "eos"}]}) == Delta(
        text="whole", finish_reason="stop"
    )


def piece(id: str | None = None, name: str | None = None, arguments: str = "", **index: Any) -> dict[str, Any]:
    return {"id": id, **index, "function": {"name": name, "arguments": arguments}}


ODD_CALLS = {
    "all as 0": [[piece("a", "f", "1", index=0)], [piece("b", "g", "2", index=0)]],
    "without numbers": [[piece("a", "f", "1")], [piece("b", "g", "2", index=None)]],
    "from 1": [[piece("a", "f", index=1)], [piece(arguments="1", index=1), piece("b", "g", "2", index=2)]],
    "an id for each piece": [
        [piece("a", "f", index=0), piece("b", "g", index=1)],
        [piece("x", None, "1", index=0), piece("y", "", "2", index=1)],
    ],
    "an id that is repeated": [
        [piece("a", "f", "1", index=0)],
        [piece("a", "f", index=0), piece("b", "g", "2", index=1)],
    ],
    "in turns, all as 0": [
        [piece("a", "f", index=0)], [piece("b", "g", index=0)], [piece("a", None, "1", index=0)],
        [piece("b", None, "2", index=0)],
    ],
    "in turns, without numbers": [
        [piece("a", "f")], [piece("b", "g")], [piece("b", None, "2")], [piece("a", "", "1")],
    ],
    "ids in the first pieces only, without numbers": [
        [piece("a", "f")], [piece(None, "", "1")], [piece("b", "g")], [piece(None, "", "2")],
    ],
    "both in each chunk, without numbers": [
        [piece("a", "f"), piece("b", "g")], [piece(arguments="1"), piece(arguments="2")],
    ],
    "in turns, an empty name repeated": [
        [piece("a", "f", index=0)], [piece("b", "g", index=1)], [piece("", "", "1", index=0)],
        [piece("", "", "2", index=1)],
    ],
    "the name after its arguments": [
        [piece("a", None, "", index=0)], [piece(None, None, "1", index=0)], [piece(None, "f", index=0)],
        [piece("b", "g", "2", index=1)],
    ],
    "the name after its arguments, without numbers": [
        [piece("a", None, "1")], [piece("a", "f")], [piece("b", "g", "2")],
    ],
    "the second without an id": [[piece("a", "f", "1", index=0)], [piece("b", "g", "2")]],
}  # fmt: skip


@pytest.mark.parametrize("calls", ODD_CALLS.values(), ids=ODD_CALLS)
@pytest.mark.parametrize("late", [False, True], ids=["", "after the end"])
def test_tool_calls_however_they_are_numbered(calls: list[Any], late: bool) -> None:
    numbers, answer = CallNumbers(), Accumulator()
    messages = [{"tool_calls": one, "reasoning": "hm"} for one in calls]
    deltas = [numbers.numbered(to_delta({"choices": [{"delta": message}]})) for message in messages]
    for delta in [reduce(merged, deltas)] if late else deltas:
        answer.add(delta)
    [(_, choice)] = answer.all()
    found = [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in choice.extra["tool_calls"]]
    assert found == [("a", "f", "1"), ("b", "g", "2")] and choice.extra["reasoning"] == "hm" * len(calls)


@pytest.mark.parametrize(
    "calls",
    ["f()", ["f()"], [{"index": "0"}], [{"index": -1}], [{"function": "f"}], [{"function": {"arguments": {"a": 1}}}]],
)
def test_calls_that_cannot_be_put_together_are_refused(calls: Any) -> None:
    with pytest.raises(UpstreamError, match="wrong shape"):
        to_delta({"choices": [{"delta": {"tool_calls": calls}}]})


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (("stop", "eos_token", "a word of next year"), "stop"),
        (("length", "model_length", "MAX_TOKENS"), "length"),
        (("tool_use", "function_call"), "tool_calls"),
        (("SAFETY", "sensitive"), "content_filter"),
        (("abort", "error", "insufficient_system_resource"), "cancelled"),
        (("", None), None),
    ],
)
def test_why_an_answer_ended_in_other_servers_words(words: tuple[str | None, ...], read: str | None) -> None:
    for word in words:
        assert to_delta({"choices": [{"delta": {"content": "a"}, "finish_reason": word}]}).finish_reason == read


@pytest.mark.parametrize(
    "chunk",
    [{"error": {"message": "no memory"}}, {"error": "no memory"}, {"object": "error", "message": "no memory"}],
)
def test_an_error_in_the_stream_is_raised(chunk: Any) -> None:
    with pytest.raises(UpstreamError, match="error: no memory"):
        to_delta(chunk)


@given(JSON)
def test_any_json_is_a_delta_or_an_upstream_error(value: Any) -> None:
    for chunk in (
        value,
        {"choices": value},
        {"choices": [{"delta": value, "logprobs": value, "finish_reason": value}]},
    ):
        with suppress(UpstreamError):
            assert isinstance(to_delta(chunk), Delta)
    for name in ("usage", "speculation", "error", "object"):
        with suppress(UpstreamError):
            assert isinstance(to_delta({"choices": [], name: value}), Delta)


COUNTS = {"drafted": 4, "accepted": 2, "steps": 3, "estimated_seconds_saved": 0.5}
STEPS = {**COUNTS, "strategy": "s", "proposed_steps": 1}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "chunk",
    [
        {"usage": {"prompt_tokens": 1, "completion_tokens_details": {"accepted_prediction_tokens": "#"}}},
        {"speculation": {**COUNTS, "estimated_seconds_saved": "#"}},
        {"speculation": {**STEPS, "knobs": {"a": ["#"]}}},
        {"choices": [{"delta": {"content": "a", "annotations": ["#"]}}]},
        {"choices": [{"delta": {"content": "a", "tool_calls": [{"function": {}, "odd": "#"}]}}]},
        {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": "#"}]}}]},
    ],
)
def test_chunks_that_were_read_can_be_written_again(chunk: Any, number: str) -> None:
    """Python reads NaN, and numbers beyond a double's range as infinity, which no JSON can hold."""
    given = json.loads(json.dumps(chunk).replace('"#"', number))
    asked = GenerateRequest("m", [{"role": "user", "content": "x"}], sampling=SamplingParams(logprobs=True))
    writer = ChatWriter(asked, AnswerFormat())
    with suppress(UpstreamError):
        writer.add(to_delta(given))
        encode(writer.body())


@pytest.mark.parametrize(
    ("given", "read"), [("NaN", -9999.0), ("-Infinity", -9999.0), ("-1e5", -9999.0), ("1e999", 0.0), ("800.0", 0.0)]
)
def test_log_probabilities_are_clamped(given: str, read: float) -> None:
    """Others compute with them: a judge's score is a mean weighted by probabilities."""
    item = json.loads(f'{{"token": "a", "logprob": {given}, "top_logprobs": [{{"token": "b", "logprob": {given}}}]}}')
    (token,) = to_delta({"choices": [{"delta": {}, "logprobs": {"content": [item]}}]}).logprobs
    assert (token.logprob, token.top[0].logprob) == (read, read)


@pytest.mark.parametrize("field", [{"degraded": 5}, {"kept_tokens": []}, {"trace": {}}, {"lossy": "no"}])
def test_speculation_fields_of_other_types_are_left_out(field: dict[str, Any]) -> None:
    assert to_delta({"speculation": STEPS | field}).speculation == StepSpeculation(
        4, 2, 3, 0.5, strategy="s", proposed_steps=1
    )


SPECULATED = st.integers(0, 2**53)


@given(st.builds(Usage, SPECULATED, SPECULATED, SPECULATED))
@pytest.mark.parametrize("predicted", [None, 3])
def test_usage_is_read_as_it_was_written(predicted: int | None, usage: Usage) -> None:
    usage = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, predicted, predicted, predicted)
    written = json.loads(json.dumps(usage_object(usage)))
    assert read_usage(written) == usage and written["total_tokens"] == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(
    "speculation",
    [
        Speculation(4, 2, 3, 0.5),
        StepSpeculation(4, 2, 3, -0.25, strategy="specreason", knobs={"threshold": 7}, kept_tokens={"base": 3}),
        RetrievalSpeculation(4, 2, 3, 0.5, strategy="ralmspec", knowledge="docs", hit_rate=None, strides=(3, 0)),
        KnnSpeculation(4, 2, 3, 0.5, wrong=1, queries=5, searches=2, strides=(4, 1), search_seconds=0.25),
    ],
    ids=lambda one: type(one).__name__,
)
def test_speculation_is_read_as_the_class_it_was(speculation: Speculation) -> None:
    written = json.loads(json.dumps(speculation_member(speculation)["speculation"]))
    assert read_speculation(written) == speculation
    assert read_speculation({**written, "of a later version": 1}) == speculation


def test_the_sum_of_several_answers_has_their_class() -> None:
    assert summed([]) is None
    knn = KnnSpeculation(4, 2, 3, 0.5, wrong=1)
    assert summed([knn, knn]) == replace(knn, drafted=8, accepted=4, steps=6, estimated_seconds_saved=1.0, wrong=2)
    assert summed([Speculation(1, 1, 1, 0.5), knn]) == replace(
        knn, drafted=5, accepted=3, steps=4, estimated_seconds_saved=1.0
    )
    read = RetrievalSpeculation(4, 2, 3, knowledge="docs", queries=2, hit_rate=0.5, strides=(3,), seconds={"read": 1.0})
    other = replace(read, hit_rate=1.0, strides=(1, 0), seconds={"read": 0.5, "wait": 1.0})
    assert summed([read, other]) == RetrievalSpeculation(
        8, 4, 6, knowledge="docs", queries=4, strides=(3, 1, 0), seconds={"read": 1.5, "wait": 1.0}
    )


def test_usage_in_other_servers_words() -> None:
    assert read_speculation({"drafted": 3, "accepted": 2}) is None  # of another product
    details = {"input_tokens_details": {"cached_tokens": 1}}
    assert read_usage({"input_tokens": 2, "output_tokens": 3, **details}) == Usage(2, 3, 1)
    cached = {"cache_read_input_tokens": 4, "cache_creation_input_tokens": 1}
    assert read_usage({"input_tokens": 2, "output_tokens": 3, **cached}) == Usage(7, 3, 4)
    # LiteLLM's chats of Anthropic's models: all tokens of the prompt, and Anthropic's counts with them.
    assert read_usage({"prompt_tokens": 7, "completion_tokens": 3, **cached}) == Usage(7, 3, 4)
    assert read_usage({"prompt_tokens": None, "input_tokens": 2}) == Usage(2, 0)
    assert read_usage({"prompt_tokens": -3, "completion_tokens": 10**30}) == Usage(0, 2**53)
