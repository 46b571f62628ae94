"""What one tenant keeps at an upstream is not to be named by another."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.stored_names import refuse_stored_names


def said(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


NAMED: list[tuple[dict[str, Any], str]] = [
    (said({"type": "file", "file": {"file_id": "file-1"}}), "messages[0].file_id"),
    (said({"type": "document", "source": {"type": "file", "file_id": "file_1"}}), "messages[0].file_id"),
    (said({"type": "container_upload", "file_id": "file_1"}), "messages[0].file_id"),
    (said({"type": "tool_result", "content": [{"type": "image", "source": {"file_id": "f"}}]}), "messages[0].file_id"),
    ({"container": "container_1"}, "container"),
    ({"container": {"id": "container_1"}}, "container.id"),
    ({"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}, "tools[0].vector_store_ids"),
    (said({"type": "image_url", "image_url": None, "uuid": "logo-1"}), "messages[0].uuid"),
    ({"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, "messages[0].audio.id"),
    ({"container": {"skills": [{"type": "custom", "skill_id": "skill_1"}]}}, "container.skill_id"),
    (
        {"tools": [{"type": "shell", "environment": {"skills": [{"type": "skill_reference", "skill_id": "s"}]}}]},
        "tools[0].skill_id",
    ),
]


@pytest.mark.parametrize(("fields", "param"), NAMED)
def test_a_name_of_something_stored_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match="several tenants") as refused:
        refuse_stored_names(fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        said({"type": "text", "text": "file_id"}),
        said({"type": "tool_use", "id": "t", "name": "f", "input": {"file_id": "mine"}}, role="assistant"),
        said({"type": "bash_code_execution_tool_result", "content": [{"file_id": "told"}]}, role="assistant"),
        {"tools": [{"name": "f", "input_schema": {"properties": {"file_id": "x"}, "file_id": "y"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"container": "x"}}}]},
        {"container": {"skills": [{"type": "anthropic", "skill_id": "pptx"}]}},
        said({"type": "text", "text": "x", "citations": [{"type": "char_location", "file_id": "f"}]}, role="assistant"),
        {"messages": [{"role": "assistant", "annotations": [{"type": "file_citation", "file_id": "f"}]}]},
        {"messages": "none", "tools": None, "container": None},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": None, "file_data": "x"}}]}]},
    ],
)
def test_fields_that_name_nothing_stored_pass(fields: dict[str, Any]) -> None:
    refuse_stored_names(fields)
