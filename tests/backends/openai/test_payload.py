from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agentspec.backends.openai.payload import payload
from agentspec.errors import InvalidRequestError
from agentspec.types import (
    GenerateRequest,
    SamplingParams,
    StructuredOutputs,
)

MESSAGES = [{"role": "user", "content": "hi"}]


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


def test_a_default_that_was_given_is_sent() -> None:
    """A server may have another one, as vLLM has the model's own temperature; `replace` keeps what nobody gave."""
    numbers = {"temperature": 1.0, "top_p": 1, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    numbers |= {"presence_penalty": 0, "frequency_penalty": 0.0}
    assert SamplingParams(**numbers) == SamplingParams()
    for name, value in numbers.items():
        chosen = SamplingParams(**{name: value}), replace(SamplingParams(seed=1), **{name: value})
        for sampling in chosen:
            _, body = payload(request(sampling=replace(sampling, seed=2, n=1, stop=())), "m")
            assert {one: body[one] for one in (*numbers, "stop", "n") if one in body} == {name: value}


def test_every_sampling_field_travels() -> None:
    given: dict[str, Any] = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1}
    given |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "seed": 0, "max_tokens": 9, "min_tokens": 4}
    given |= {"logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    lists = {"stop": ["a", "b"], "stop_token_ids": [1, 2], "bad_words": ["x"]}
    form = StructuredOutputs(regex="a")
    sampling = SamplingParams(
        **given, **{name: tuple(one) for name, one in lists.items()}, logit_bias={7: 2.0}, structured_outputs=form
    )
    _, body = payload(request(sampling=sampling), "m")
    sent = {name: body[name] for name in SamplingParams.__dataclass_fields__ if name != "n"}
    assert sent == {**given, **lists, "logit_bias": {"7": 2.0}, "structured_outputs": {"regex": "a"}}
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
        assert caught.value.param == "n" and "one answer at a time" in str(caught.value)


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
    assert body["chat_template_kwargs"] == {"a": 1}
    assert "include_reasoning" not in body  # vLLM would leave the thoughts out, which whoever wants raw text reads
    assert payload(request(tools=(tool,)), "m")[1]["tool_choice"] == "auto"
