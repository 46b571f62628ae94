"""Bodies of all four APIs, one a line, and what they ask for or with which words they are refused.

`python tests/protocol/test_golden.py` writes what is read now into the files: look at the difference before a commit.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.protocol.anthropic.requests import MessagesRequest, parse_messages
from agentspec.protocol.completions import parse_completion
from agentspec.protocol.openai_responses.request import parse_responses
from agentspec.protocol.requests import AnswerFormat, parse_chat
from agentspec.protocol.wire import encode
from agentspec.types import GenerateRequest, SamplingParams, StructuredOutputs

FOLDER = Path(__file__).parent / "golden"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
DEFAULTS = (GenerateRequest("m", messages=[USER]), SamplingParams(), AnswerFormat(), MessagesRequest({}))


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
    return given(parse_messages({"model": "m", "max_tokens": 5, "messages": [USER], **body}, **limits))


def upstream_messages(body: dict[str, Any]) -> Any:
    return messages(body, templated=False)


def responses(body: dict[str, Any]) -> Any:
    request = parse_responses({"model": "m", "input": "hi", **body})
    told = {"unenforced": request.unenforced} if request.unenforced else {}
    return {**given(request.chat), "messages": given(request.messages()), **told}


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
def test_what_a_body_asks_for(api: str, at: int) -> None:
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
    ],
)
def test_bounds(api: str, body: dict[str, Any], param: str) -> None:
    assert outcome(api, body)["param"] == param


def main() -> None:
    for api, cases in CASES.items():
        lines = [json.dumps([body, outcome(api, body)]) for body, _ in cases]
        (FOLDER / f"{api}.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
