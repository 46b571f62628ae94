"""`/v1/responses` in front of the local engine, with a tiny random model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.settings.load import ModelSettings, Settings

MODEL = "tiny"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(shared_gateway: Any, tiny_model: Path) -> Iterator[openai.OpenAI]:
    pytest.importorskip("torch")
    settings = Settings(
        backends={"local": TorchSettings(model=str(tiny_model), device="cpu")},
        models={MODEL: ModelSettings(backend="local")},
    )
    running = shared_gateway({}, settings)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"input": "hello", "max_output_tokens": 24, "extra_body": {"seed": 1}, **fields}
    return client.responses.create(model=MODEL, **given)


def test_streamed_or_not_the_answer_is_that_of_the_chat(client: openai.OpenAI) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, seed=1)
    assert whole.output_text == streamed == chat.choices[0].message.content
    assert whole.usage.output_tokens == chat.usage.completion_tokens == events[-1].response.usage.output_tokens  # type: ignore[union-attr]
    assert whole.to_dict()["speculation"]["steps"] > 0


def test_a_continued_conversation_has_its_prompt_cached(client: openai.OpenAI) -> None:
    first = ask(client, temperature=0)
    second = ask(client, input="and?", previous_response_id=first.id, temperature=0)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_required_form(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    said = json.loads(ask(client, text=form, max_output_tokens=200).output_text)
    assert isinstance(said["yes"], bool)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"enum": ["here", "there"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "look", "parameters": parameters, "strict": True}
    answer = ask(client, tools=[tool], tool_choice=choice, max_output_tokens=200, parallel_tool_calls=False)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "look" and json.loads(call.arguments)["at"] in ("here", "there")


LARK = 'start: NAME ("=" /[0-9]{1,3}/ LF)~1..2\nNAME: "a".."c"\n%import common.LF'


@pytest.mark.parametrize(
    ("form", "fitting"),
    [
        ({"type": "grammar", "syntax": "regex", "definition": "(north|south) [0-9]{2}"}, r"(north|south) [0-9]{2}"),
        ({"type": "grammar", "syntax": "lark", "definition": LARK}, r"[a-c](=[0-9]{1,3}\n){1,2}"),
    ],
)
def test_a_custom_tool_with_a_grammar(client: openai.OpenAI, form: Any, fitting: str) -> None:
    tool = {"type": "custom", "name": "steer", "format": form}
    choice = {"type": "custom", "name": "steer"}
    answer = ask(client, tools=[tool], tool_choice=choice, max_output_tokens=200)
    [call] = [item for item in answer.output if item.type == "custom_tool_call"]
    assert call.name == "steer" and re.fullmatch(fitting, call.input)


PATCH = r"""
start: open hunk~1..2 close
open: "*** Begin Patch" LF
close: "*** End Patch" LF?
hunk: "*** Add File: " path LF line~1..2 | "*** Delete File: " path LF
path: /[a-z]{1,3}/
line: "+" /[a-z ]{0,4}/ LF -> added
%import common.LF
"""


def test_tools_that_items_bring(client: openai.OpenAI) -> None:
    """As Codex sends its patch tool, and its search for others."""
    form = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    space = {"type": "namespace", "name": "functions", "description": "All.",
             "tools": [{"type": "custom", "name": "apply_patch", "format": form}]}  # fmt: skip
    added = {"type": "additional_tools", "role": "developer", "tools": [space]}
    items: Any = [added, {"role": "user", "content": "go"}]
    [call] = ask(client, input=items, tool_choice="required", max_output_tokens=300, parallel_tool_calls=False).output
    assert (call.type, call.namespace, call.name) == ("custom_tool_call", "functions", "apply_patch")
    hunk = r"\*\*\* (Add File: [a-z]{1,3}\n(\+[a-z ]{0,4}\n){1,2}|Delete File: [a-z]{1,3}\n)"
    assert re.fullmatch(rf"\*\*\* Begin Patch\n({hunk}){{1,2}}\*\*\* End Patch\n?", call.input)

    parameters = {"type": "object", "properties": {"limit": {"enum": [1, 2]}}, "required": ["limit"],
                  "additionalProperties": False}  # fmt: skip
    tools: Any = [
        {"type": "tool_search", "execution": "client", "description": "Searches.", "parameters": parameters},
        {"type": "function", "name": "look", "description": "Looks.", "defer_loading": True},
    ]
    [found] = ask(client, tools=tools, tool_choice="required", max_output_tokens=200, parallel_tool_calls=False).output
    assert found.type == "tool_search_call" and found.arguments in ({"limit": 1}, {"limit": 2})


BAD = {"type": "nothing"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}}, "text.format.schema"),
        ({"tools": [{"type": "function", "name": "f", "parameters": BAD}], "tool_choice": "required"},
         "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n", "description": "", "tools": [
            {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "regex", "definition": "[b-a]"}}]}],
          "tool_choice": "required"}, "tools[0].tools[0].format"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused_by_the_clients_own_field(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)
    assert refused.value.param == param


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    items = [{"role": "user", "content": "x" * 400} for _ in range(8)]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, input=items)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "input"
    assert ask(client, input=items, truncation="auto").usage.input_tokens < 2048
