"""Bodies of all four APIs, one a line, and what they ask for or with which words they are refused.

`python tests/protocol/test_golden.py` writes what is read now into the files: look at the difference before a commit.
"""

from __future__ import annotations

import json
import typing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from anthropic import types
from hypothesis import given as drawn
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.protocol.anthropic.requests import (
    INERT,
    PASSED,
    SAID,
    WRITTEN,
    MessagesBody,
    MessagesRequest,
    MessagesTool,
    parse_messages,
)
from agentspec.protocol.completions import parse_completion
from agentspec.protocol.openai_responses.request import parse_responses
from agentspec.protocol.requests import AnswerFormat, parse_chat, with_extra
from agentspec.protocol.wire import encode
from agentspec.types import GenerateRequest, SamplingParams, StructuredOutputs

FOLDER = Path(__file__).parent / "golden"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
MANY = [{"type": "function", "name": f"f{number}"} for number in range(128)]
DEFAULTS = (GenerateRequest("m", messages=[USER]), SamplingParams(), AnswerFormat(), MessagesRequest())


def given(value: Any) -> Any:
    """`value` as JSON, of a dataclass only what differs from the defaults."""
    for default in DEFAULTS:
        if type(value) is type(default):
            named = {one.name: getattr(value, one.name) for one in fields(value)}
            return {
                name: given(one) for name, one in named.items() if name != "names" and one != getattr(default, name)
            }
    if isinstance(value, StructuredOutputs):
        value = {**value.given, "param": value.param}
    return json.loads(json.dumps(value))


def chat(body: dict[str, Any]) -> Any:
    request, form = parse_chat({"model": "m", "messages": [USER], **body}, max_messages=10)
    return given(request) | given(form)


def completion(body: dict[str, Any]) -> Any:
    request, form = parse_completion({"model": "m", "prompt": "p", **body})
    return given(request) | given(form)


def messages(body: dict[str, Any], **limits: bool) -> Any:
    chat, asked = parse_messages({"model": "m", "max_tokens": 5, "messages": [USER], **body}, **limits)
    return {"chat": given(chat), **given(asked)}


def upstream_messages(body: dict[str, Any]) -> Any:
    return messages(body, templated=False)


def responses(body: dict[str, Any]) -> Any:
    request = parse_responses({"model": "m", "input": "hi", **body})
    return {**given(request.chat), "messages": given(request.messages())}


def upstream_responses(body: dict[str, Any]) -> Any:
    return responses(body)


APIS = {one.__name__: one for one in (chat, completion, messages, upstream_messages, responses, upstream_responses)}
CASES = {name: [*map(json.loads, (FOLDER / f"{name}.jsonl").read_text().splitlines())] for name in APIS}


def outcome(api: str, body: dict[str, Any]) -> Any:
    try:
        return {"reads": APIS[api](body)}
    except InvalidRequestError as error:
        encode(error.body())
        assert error.status == 400
        return {"refused": error.message, "param": error.param}


@pytest.mark.parametrize(("api", "at"), [(api, at) for api in APIS for at in range(len(CASES[api]))])
def test_each_body_is_read_or_refused_as_recorded(api: str, at: int) -> None:
    body, expected = CASES[api][at]
    assert outcome(api, body) == expected


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        ("chat", {"tools": [TOOL] * 129}, "tools"),
        ("chat", {"messages": [USER] * 11}, "messages"),
        ("chat", {"stop": ["x"] * 65}, "stop"),
        ("chat", {"stop": ["x" * 1025]}, "stop"),
        ("chat", {"bad_words": ["x"] * 65}, "bad_words"),
        ("chat", {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ("chat", {"guided_choice": ["a"] * 4097}, "guided_choice"),
        ("chat", {"temperature": 10**400}, "temperature"),
        ("messages", {"messages": [USER] * 2049}, "messages"),
        ("messages", {"tools": [{"name": "f", "input_schema": {}}] * 129}, "tools"),
        ("responses", {"input": [USER] * 2049}, "input"),
        ("responses", {"tools": [{"type": "function", "name": "f"}] * 129}, "tools"),
        (
            "responses",
            {"tools": [{"type": "namespace", "name": "n", "tools": MANY}, {"type": "custom", "name": "f"}]},
            "tools",
        ),
    ],
)
def test_bounds(api: str, body: dict[str, Any], param: str) -> None:
    assert outcome(api, body)["param"] == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({name for cases in CASES.values() for body, _ in cases for name in body})


@drawn(st.sampled_from([*APIS]), st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), JSON, max_size=4))
def test_any_body_is_a_request_or_refused(api: str, fields: dict[str, Any]) -> None:
    assert {*outcome(api, fields)} <= {"reads", "refused", "param"}


def test_the_local_engine_acts_on_the_extra_fields_of_a_client_in_this_process() -> None:
    request = GenerateRequest("m", messages=[USER], priority=4)
    extra = {"n": 2, "tools": [TOOL], "guided_regex": "a", "return_token_ids": True, "user": "u", "top_k": None}
    sampling = SamplingParams(n=2, structured_outputs=StructuredOutputs(regex="a"))
    expected = replace(request, sampling=sampling, tools=(TOOL,), return_prompt=True)
    assert with_extra(replace(request, extra=extra)) == expected and with_extra(request) is request
    for refused in ({"top_k": "3"}, {"messages": [{}]}, {"priority": "high"}):
        with pytest.raises(InvalidRequestError):
            with_extra(replace(request, extra=refused))


def test_every_field_of_anthropics_types_is_known() -> None:
    def names(kind: Any) -> set[str]:
        return set(typing.get_type_hints(kind))

    known = {*MessagesBody.model_fields, *INERT, *PASSED, "container"}  # of code on Anthropic's servers: refused
    assert names(types.message_create_params.MessageCreateParamsStreaming) <= known
    assert names(types.MessageCountTokensParams) <= known
    assert names(types.ToolParam) <= {*MessagesTool.model_fields} | MessagesTool.inert
    for kind, model in (SAID | WRITTEN).items():
        if kind != "tool_reference":
            block = getattr(types, f"{kind.title().replace('_', '')}BlockParam")
            assert names(block) <= {*model.model_fields} | model.inert, kind


def main() -> None:
    for api, cases in CASES.items():
        lines = [json.dumps([body, outcome(api, body)]) for body, _ in cases]
        (FOLDER / f"{api}.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
