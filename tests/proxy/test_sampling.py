"""What a request may ask of its answer, through the gateway: forms, tool calls, several choices, tokens and scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings

pytest.importorskip("torch")
MODEL = "tiny"
OFF = {"x-agentspec-speculation": "off"}


PLACE = {"type": "string", "enum": ["Rome", "Oslo"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather somewhere.",
            "parameters": {
                "type": "object",
                "properties": {"place": PLACE, "hourly": {"type": "boolean"}},
                "required": ["place", "hourly"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]


@pytest.fixture(scope="module")
def running(shared_gateway: Any, tiny_model: Path) -> Any:
    settings = Settings(
        server=ServerSettings(request_timeout=120),
        backends={"local": TorchSettings(model=str(tiny_model), device="cpu", max_active=2)},
        models={MODEL: ModelSettings(backend="local")},
    )
    return shared_gateway({}, settings)


@pytest.fixture(scope="module")
def client(running: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, content: str = "hello", **fields: Any) -> Any:
    defaults: dict[str, Any] = {"max_tokens": 200, "seed": 1, "model": MODEL}
    messages: list[Any] = [{"role": "user", "content": content}]
    return client.chat.completions.create(messages=messages, **{**defaults, **fields})


@pytest.mark.parametrize(
    ("extra", "answers"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "(ab){2}"}, ("abab",)),
        ({"structured_outputs": {"regex": "a/b|[0-9]{2}c"}}, ("a/b", *(f"{n:02}c" for n in range(100)))),
        ({"guided_grammar": 'start: "x" | "(" start ")"'}, tuple("(" * n + "x" + ")" * n for n in range(60))),
        ({"structured_outputs": {"grammar": 'start: "1" | "2"'}}, ("1", "2")),
        ({"guided_json": {"enum": [1, 22]}}, ("1", "22")),
    ],
)
def test_other_forms_on_both_routes(client: openai.OpenAI, extra: dict[str, Any], answers: tuple[str, ...]) -> None:
    chat = ask(client, extra_body=extra)
    assert chat.choices[0].message.content in answers
    plain = client.completions.create(model=MODEL, prompt="x", max_tokens=200, seed=3, extra_body=extra)
    assert plain.choices[0].text in answers


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a\\"}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_json": {"type": "nothing"}}, "guided_json"),
        ({"structured_outputs": {"json": {"$ref": "http://elsewhere/x"}}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
         "response_format.json_schema.schema"),
        ({"tools": [TOOLS[0], {"type": "function", "function": {"name": "g", "parameters": {"type": "nothing"}}}],
          "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tools[1].function.parameters"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused_by_the_clients_own_field(
    client: openai.OpenAI, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=extra)
    assert caught.value.param == param


def streamed(chunks: Any) -> tuple[str, list[list[str]], list[Any]]:
    """Text, calls as [id, name, arguments], and the reasons of every end."""
    text, calls, ends = "", [], []
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                if piece.id:
                    assert piece.index == len(calls) and piece.type == "function"
                    calls.append([piece.id, piece.function.name, ""])
                calls[piece.index][2] += piece.function.arguments or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
    return text, calls, ends


@pytest.mark.parametrize(
    ("choice", "names", "end"),
    [
        ("required", {"weather", "now"}, "tool_calls"),
        pytest.param(
            *({"type": "function", "function": {"name": "weather"}}, {"weather"}, "stop"), marks=pytest.mark.slow
        ),
        ({"type": "function", "function": {"name": "now"}}, {"now"}, "stop"),
    ],
)
def test_tool_calls_streamed_and_whole(client: openai.OpenAI, choice: Any, names: set[str], end: str) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    text, calls, ends = streamed(ask(client, stream=True, **fields))
    whole = ask(client, **fields).choices[0]
    off = ask(client, extra_headers=OFF, **fields).choices[0]
    [[_, name, arguments]] = calls
    for message in (whole.message, off.message):
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [(name, arguments)]
        assert message.content is None
    assert text == "" and ends == [whole.finish_reason] == [end] and name in names
    given = json.loads(arguments)
    assert given == {} if name == "now" else set(given) == {"place", "hourly"} and given["place"] in PLACE["enum"]


def test_token_ids_go_in_and_out(running: Any, client: openai.OpenAI) -> None:
    engine = running.runtime.backends()["local"]
    asked = {"return_token_ids": True}
    whole = ask(client, max_tokens=8, extra_body=asked).to_dict()
    assert whole["prompt_token_ids"] == engine.encode_chat([{"role": "user", "content": "hello"}])
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    chunks = [chunk.to_dict() for chunk in ask(client, max_tokens=8, extra_body=asked, stream=True)]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids
    plain = client.completions.create(
        model=MODEL, prompt=whole["prompt_token_ids"], max_tokens=8, seed=1, extra_body=asked
    ).to_dict()
    assert plain["choices"][0]["token_ids"] == ids
    assert plain["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]
