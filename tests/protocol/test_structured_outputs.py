from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.protocol.structured_outputs import MAX_CHOICES, parse_form
from agentspec.types import StructuredOutputs


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
