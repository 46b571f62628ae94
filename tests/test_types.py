from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest, Namespace, SamplingParams, StructuredOutputs


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 1.1},
        {"repetition_penalty": 0.0}, {"max_tokens": 0}, {"top_logprobs": 21}, {"logit_bias": {1: 101.0}},
        {"stop": ("",)}, {"stop": "END"}, {"n": 0}, {"min_tokens": -1}, {"min_tokens": 2, "max_tokens": 1},
        {"bad_words": (" ",)}, {"bad_words": "x"},
    ],
)  # fmt: skip
def test_sampling_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**options)
    assert caught.value.param == next(iter(options))


@pytest.mark.parametrize("prompt", [{}, {"text": "a", "token_ids": [1]}, {"text": "a", "continue_final": True}])
def test_a_request_has_one_prompt(prompt: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        GenerateRequest("m", **prompt)


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "f"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "g", "tools": (FUNCTION,)}, "tool_choice"),
    ],
)
def test_a_tool_that_is_chosen_is_there(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GenerateRequest("m", messages=[], **fields)
    assert caught.value.param == param
    for choice in ("f", "required", "none"):
        assert GenerateRequest("m", messages=[], tools=(FUNCTION,), tool_choice=choice).tool_choice == choice
    with pytest.raises(InvalidRequestError, match="tools need messages"):
        GenerateRequest("m", text="x", tools=(FUNCTION,))


@pytest.mark.parametrize(
    "fields", [{}, {"json": {}, "regex": "a"}, {"json_object": False}, {"choice": ()}, {"choice": ("",)}]
)
def test_an_answer_has_one_form(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == "structured_outputs"


def test_a_namespaces_key_depends_on_every_part_and_on_where_it_stands() -> None:
    parts = [Namespace("a"), Namespace("b"), Namespace("a", "b"), Namespace("a", "", "b"), Namespace("a", "", "", "b")]
    assert len({space.key for space in parts}) == len(parts)
