from __future__ import annotations

import json
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.openai.payload import label_headers, payload, to_delta
from agentspec.errors import InvalidRequestError, UpstreamError
from agentspec.types import (
    Delta,
    GenerateRequest,
    Labels,
    SamplingParams,
    Speculation,
    StructuredOutputs,
    TokenLogprob,
    Usage,
)

MESSAGES = [{"role": "user", "content": "hi"}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "m", "messages": MESSAGES, **fields})


def test_only_what_differs_from_the_defaults_is_sent() -> None:
    path, body = payload(request(), "up")
    assert path == "/chat/completions"
    assert body == {
        "model": "up",
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_every_sampling_field_travels() -> None:
    sampling = SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias={7: 2.0},
        seed=0,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        max_tokens=9,
        logprobs=True,
        top_logprobs=2,
        min_tokens=4,
        ignore_eos=True,
        bad_words=("x",),
        prompt_logprobs=0,
        structured_outputs=StructuredOutputs(regex="a"),
    )
    _, body = payload(request(sampling=sampling), "m")
    sent = {name: body[name] for name in SamplingParams.__dataclass_fields__ if name != "n"}
    assert sent == {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 2.0},
        "seed": 0,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
        "min_tokens": 4,
        "ignore_eos": True,
        "bad_words": ["x"],
        "prompt_logprobs": 0,
        "structured_outputs": {"regex": "a"},
    }
    json.dumps(body)
    _, body = payload(request(messages=None, text="p", sampling=sampling), "m")
    assert body["logprobs"] == 2 and "top_logprobs" not in body


def test_prompts_take_their_route() -> None:
    assert payload(request(messages=None, text="p"), "m")[0] == "/completions"
    path, body = payload(request(messages=None, token_ids=[1, 2]), "m")
    assert (path, body["prompt"]) == ("/completions", [1, 2])


def test_continuing_a_message_starts_no_new_one() -> None:
    _, body = payload(request(continue_final=True), "m")
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


def test_extra_is_merged_and_cannot_turn_streaming_off() -> None:
    extra = {"tools": [1], "stream": False, "model": "x", "stream_options": None}
    _, body = payload(request(extra=extra), "m")
    assert body["tools"] == [1] and body["stream"] is True and body["model"] == "m"
    assert body["stream_options"] == {"include_usage": True}


def test_prediction_is_forwarded_only_through_extra() -> None:
    assert "prediction" not in payload(request(prediction="text"), "m")[1]
    asked = {"type": "content", "content": "text"}
    assert payload(request(prediction="text", extra={"prediction": asked}), "m")[1]["prediction"] == asked


def test_more_choices_than_one_are_refused() -> None:
    for asked in (request(extra={"n": 2}), request(sampling=SamplingParams(n=2))):
        with pytest.raises(InvalidRequestError) as caught:
            payload(asked, "m")
        assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("form", "sent"),
    [
        (StructuredOutputs(json_object=True), {"response_format": {"type": "json_object"}}),
        (
            StructuredOutputs(json={"type": "object"}),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        (StructuredOutputs(choice=("a", "b")), {"structured_outputs": {"choice": ("a", "b")}}),
    ],
)
def test_forms_travel_as_openai_has_them_where_it_has_them(form: StructuredOutputs, sent: dict[str, Any]) -> None:
    _, body = payload(request(sampling=SamplingParams(structured_outputs=form)), "m")
    assert sent.items() <= body.items()
    json.dumps(body)


def test_tools_travel() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    asked = request(
        tools=(tool,),
        tool_choice="f",
        parallel_tool_calls=False,
        start_answer=False,
        return_prompt=True,
        split_reasoning=False,
        template_arguments={"a": 1},
    )
    _, body = payload(asked, "m")
    named = {"type": "function", "function": {"name": "f"}}
    assert body["tools"] == [tool] and body["tool_choice"] == named and body["parallel_tool_calls"] is False
    assert body["add_generation_prompt"] is False and body["return_token_ids"] is True
    assert body["chat_template_kwargs"] == {"a": 1} and body["include_reasoning"] is False
    assert payload(request(tools=(tool,)), "m")[1]["tool_choice"] == "auto"


@given(st.text(min_size=1, max_size=20))
def test_labels_survive_the_header(label: str) -> None:
    try:
        label.encode()
    except UnicodeEncodeError:
        return
    sent = label_headers(request(labels=Labels(session=label)))["x-agentspec-session"]
    assert sent.isascii() and sent.isprintable() and sent == sent.strip()
    assert unquote(sent) == label


def test_switches_are_sent_when_off() -> None:
    assert label_headers(request()) == {}
    sent = label_headers(request(speculation=False, store=False, labels=Labels(workflow="w", step="s")))
    assert sent == {
        "x-agentspec-workflow": "w",
        "x-agentspec-step": "s",
        "x-agentspec-speculation": "off",
        "x-agentspec-store": "off",
    }


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


def test_usage_alone() -> None:
    assert to_delta({"choices": [], "usage": {"prompt_tokens": -3, "completion_tokens": 10**30}}) == Delta(
        usage=Usage(0, 2**53)
    )


@pytest.mark.parametrize("error", [{"message": "no memory"}, "no memory"])
def test_an_error_in_the_stream_is_raised(error: Any) -> None:
    with pytest.raises(UpstreamError, match="no memory"):
        to_delta({"error": error})


@given(JSON)
def test_any_json_is_a_delta_or_an_upstream_error(value: Any) -> None:
    for chunk in (
        value,
        {"choices": value},
        {"choices": [{"delta": value, "logprobs": value, "finish_reason": value}]},
    ):
        with suppress(UpstreamError):
            assert isinstance(to_delta(chunk), Delta)
    for name in ("usage", "speculation", "error"):
        with suppress(UpstreamError):
            assert isinstance(to_delta({"choices": [], name: value}), Delta)
