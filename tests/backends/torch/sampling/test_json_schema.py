from __future__ import annotations

from agentspec.backends.torch.sampling.json_schema import closed_schema


def test_objects_that_list_their_properties_are_closed_unless_the_schema_says_otherwise() -> None:
    inner = {"properties": {"properties": {"type": "string"}}}
    closed = closed_schema({"type": "object", "properties": {"a": inner, "b": {"enum": [{"properties": {}}]}}})
    assert closed["additionalProperties"] is False and closed["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in closed["properties"]["a"]["properties"]
    assert closed["properties"]["b"] == {"enum": [{"properties": {}}]}
    for schema in (
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "patternProperties": {"x": {}}},
        {"allOf": [inner, inner]},
        {"type": "object"},
    ):
        assert {**closed_schema(schema), "x-guidance": None} == {**schema, "x-guidance": None}
