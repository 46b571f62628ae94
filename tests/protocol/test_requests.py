from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.protocol.completions import parse_completion
from agentspec.protocol.requests import AnswerFormat, parse_chat, with_extra
from agentspec.protocol.structured_outputs import MAX_CHOICES, parse_form
from agentspec.protocol.wire import encode
from agentspec.types import GenerateRequest, SamplingParams, StructuredOutputs

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def ask(**fields: Any) -> GenerateRequest:
    return parse_chat({**BODY, **fields}, max_messages=10)[0]


def test_the_smallest_request() -> None:
    assert parse_chat(BODY, max_messages=10) == (GenerateRequest("m", messages=BODY["messages"]), AnswerFormat())


def test_every_field_that_is_acted_on() -> None:
    request, form = parse_chat(
        {
            **BODY,
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "name": "x", "tool_calls": [], "refusal": None},
            ],
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 4,
            "min_p": 0.1,
            "presence_penalty": 1,
            "frequency_penalty": -1.5,
            "repetition_penalty": 1.2,
            "logit_bias": {"5": 1, "7": -100},
            "seed": -3,
            "stop": "x",
            "stop_token_ids": [1],
            "max_completion_tokens": 5,
            "logprobs": True,
            "top_logprobs": 3,
            "prediction": {"type": "content", "content": [{"type": "text", "text": "p"}]},
            "continue_final_message": True,
            "add_generation_prompt": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        max_messages=10,
    )
    assert form == AnswerFormat(stream=True, usage=True)
    assert request.messages == [{"role": "system", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert request.continue_final and request.prediction == "p"
    assert request.sampling == SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        logit_bias={5: 1, 7: -100},
        seed=-3,
        stop=("x",),
        stop_token_ids=(1,),
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "u"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "auto"),
        ("safety_identifier", "s"),
        ("prompt_cache_key", "k"),
        ("n", 1),
        ("tools", []),
        ("tool_choice", "auto"),
        ("tool_choice", "none"),
        ("response_format", None),
        ("echo", False),
        ("skip_special_tokens", True),
        ("length_penalty", 1.0),
        ("min_tokens", 0),
        ("parallel_tool_calls", False),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("temperature", None),
        ("unheard_of", None),
        ("top_k", -1),
        ("max_tokens", None),
        ("chat_template_kwargs", {}),
        ("verbosity", "low"),
    ],
)
def test_inert_fields_change_nothing(field: str, value: Any) -> None:
    assert ask(**{field: value}) == ask()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "auto"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"function": {}}, "tools": [TOOL]}, "tool_choice.function.name"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 100}, "bad_words"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"best_of": 2}, "best_of"),
        ({"unheard_of": 0}, "unheard_of"),
        ({"api_base": "http://evil"}, "api_base"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": "x", "more": 1}}, "prediction"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 11}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask(**fields)
    assert caught.value.param == param and caught.value.status == 400
    encode(caught.value.body())


def test_the_fields_of_vllm() -> None:
    request = ask(
        n=3,
        min_tokens=2,
        max_tokens=4,
        ignore_eos=True,
        bad_words=["x"],
        prompt_logprobs=2,
        return_token_ids=True,
        chat_template_kwargs={"enable_thinking": False},
        include_reasoning=False,
        add_generation_prompt=False,
    )
    sampling = request.sampling
    assert (sampling.n, sampling.min_tokens, sampling.ignore_eos, sampling.bad_words) == (3, 2, True, ("x",))
    assert sampling.prompt_logprobs == 2 and request.return_prompt and not request.include_reasoning
    assert request.template_arguments == {"enable_thinking": False} and not request.start_answer


@pytest.mark.parametrize(
    ("choice", "read"), [("required", "required"), ({"function": {"name": "f"}}, "f"), ("none", "none")]
)
def test_tools_may_be_called_as_the_choice_allows(choice: Any, read: str) -> None:
    request = ask(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert request.tools == (TOOL,) and request.tool_choice == read and not request.parallel_tool_calls


def test_the_local_engine_acts_on_the_extra_fields_of_a_client_in_this_process() -> None:
    request = GenerateRequest("m", messages=[{"role": "user", "content": "x"}], priority=4)
    extra = {"n": 2, "tools": [TOOL], "guided_regex": "a", "return_token_ids": True, "user": "u", "top_k": None}
    changed = with_extra(replace(request, extra=extra))
    assert changed == replace(
        request,
        sampling=SamplingParams(n=2, structured_outputs=StructuredOutputs(regex="a")),
        tools=(TOOL,),
        return_prompt=True,
    )
    assert with_extra(request) is request
    for refused in ({"top_k": "3"}, {"messages": [{}]}, {"priority": "high"}):
        with pytest.raises(InvalidRequestError):
            with_extra(replace(request, extra=refused))


NAMES = [
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens", "logit_bias",
    "logprobs", "top_logprobs", "stream", "stream_options", "prediction", "messages", "model", "n", "tools",
    "stop_token_ids", "continue_final_message", "user", "other", "tool_choice", "response_format", "structured_outputs",
    "guided_json", "bad_words", "chat_template_kwargs",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), JSON, max_size=4))
def test_any_body_is_a_request_or_refused(fields: dict[str, Any]) -> None:
    try:
        assert isinstance(ask(**fields), GenerateRequest)
    except InvalidRequestError as error:
        encode(error.body())


def test_how_soon_a_request_is_to_be_served() -> None:
    assert (ask().priority, ask().latency_target_ms_per_token) == (0, None)
    request = ask(priority=3, latency_target_ms_per_token=20)
    assert (request.priority, request.latency_target_ms_per_token) == (3, 20)


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", -1), ("priority", 0.5), ("latency_target_ms_per_token", 0), ("latency_target_ms_per_token", "fast")],
)
def test_no_request_pushes_ahead_or_asks_the_impossible(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask(**{field: value})
    assert caught.value.param == field


# Completions --------------------------------------------------------------------------------------------------------


def complete(**fields: Any) -> GenerateRequest:
    return parse_completion({"model": "m", "prompt": "p", **fields})[0]


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("p", "p", None), (["p"], "p", None), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2))],
)
def test_prompts(prompt: Any, text: str | None, token_ids: tuple[int, ...] | None) -> None:
    request = complete(prompt=prompt)
    assert (request.text, request.token_ids) == (text, token_ids)


def test_logprobs_are_a_number_here() -> None:
    assert not complete().sampling.logprobs
    assert complete(logprobs=0).sampling.logprobs and complete(logprobs=0).sampling.top_logprobs == 0
    assert complete(logprobs=5).sampling.top_logprobs == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"n": 0}, "n"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"tools": [TOOL]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": [{}]}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
    ],
)
def test_refused_completions_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        complete(**fields)
    assert caught.value.param == param


def test_echo_wants_the_prompt_scored_as_the_answer_is() -> None:
    assert complete(echo=True).return_prompt and complete(echo=True).sampling.prompt_logprobs is None
    assert complete(echo=True, logprobs=2).sampling.prompt_logprobs == 2
    assert complete(return_token_ids=True).return_prompt
    assert complete(n=2, best_of=2, guided_choice=["a"]).sampling.n == 2


def test_harmless_values_are_accepted() -> None:
    assert complete(echo=False, suffix="", best_of=1, n=1, user="u") == complete()


@pytest.mark.parametrize(
    ("effort", "arguments"),
    [
        ("none", {"enable_thinking": False}),
        ("minimal", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
        ("xhigh", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_the_effort_is_told_to_the_chat_template(effort: str, arguments: dict[str, Any]) -> None:
    assert ask(reasoning_effort=effort).template_arguments == arguments
    own = {"enable_thinking": True, "other": 1}
    assert ask(reasoning_effort=effort, chat_template_kwargs=own).template_arguments == arguments | own


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}}}},
            StructuredOutputs(json={}),
        ),
        ({"structured_outputs": {"json": {"type": "object"}}}, StructuredOutputs(json={"type": "object"})),
        ({"structured_outputs": {"regex": "a", "choice": None}}, StructuredOutputs(regex="a")),
        ({"structured_outputs": {"grammar": "start: x"}}, StructuredOutputs(grammar="start: x")),
        ({"guided_json": '{"type": "object"}'}, StructuredOutputs(json={"type": "object"})),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_grammar": "root ::= x"}, StructuredOutputs(grammar="root ::= x")),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_forms_by_every_name(fields: dict[str, Any], form: StructuredOutputs | None) -> None:
    assert parse_form(fields) == form


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": 1}, "response_format must be an object, not a number"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be text, json_object or json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema must be an object, not a number",
        ),
        ({"guided_json": "{"}, "guided_json is a string that is not JSON"),
        ({"guided_choice": [1]}, "guided_choice must be a string, not a number"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice has 4097 entries; 4096 are allowed"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice must be an array, not a string"),
        ({"structured_outputs": {"x": 1}}, "structured_outputs.x is not supported by this model"),
        ({"structured_outputs": {}}, "structured_outputs must hold exactly one kind of form, not 0"),
        ({"guided_regex": "a", "guided_json": {}}, "send one of guided_regex, guided_json, not all"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_form(fields)
    assert caught.value.message == message
