"""`/v1/responses` in front of the local engine, with a tiny random model."""

from __future__ import annotations

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


def test_a_continued_conversation_has_its_prompt_cached(client: openai.OpenAI) -> None:
    first = ask(client, temperature=0)
    second = ask(client, input="and?", previous_response_id=first.id, temperature=0)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_tools_that_items_bring(client: openai.OpenAI) -> None:
    """As Codex sends its patch tool."""
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    space = {"type": "namespace", "name": "functions", "description": "All.",
             "tools": [{"type": "custom", "name": "apply_patch", "format": form}]}  # fmt: skip
    added = {"type": "additional_tools", "role": "developer", "tools": [space]}
    items: Any = [added, {"role": "user", "content": "go"}]
    [call] = ask(client, input=items, tool_choice="required", max_output_tokens=300, parallel_tool_calls=False).output
    assert (call.type, call.namespace, call.name) == ("custom_tool_call", "functions", "apply_patch")


BAD = {"type": "nothing"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}}, "text.format.schema"),
        ({"tools": [{"type": "function", "name": "f", "parameters": BAD}], "tool_choice": "required"},
         "tools[0].parameters"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused_by_the_clients_own_field(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)
    assert refused.value.param == param
