"""What one tenant keeps at an upstream is not to be named by another."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.kept_names import refuse_kept_names


def said(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


NAMED: list[tuple[dict[str, Any], str]] = [
    (said({"type": "file", "file": {"file_id": "file-1"}}), "messages[0].file_id"),
    (said({"type": "document", "source": {"type": "file", "file_id": "file_1"}}), "messages[0].file_id"),
    (said({"type": "container_upload", "file_id": "file_1"}), "messages[0].file_id"),
    (said({"type": "tool_result", "content": [{"type": "image", "source": {"file_id": "f"}}]}), "messages[0].file_id"),
    ({"container": "container_1"}, "container"),
    ({"container": {"id": "container_1"}}, "container"),
    ({"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}, "tools[0].vector_store_ids"),
]


@pytest.mark.parametrize(("fields", "param"), NAMED)
def test_what_is_kept_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match="several tenants") as refused:
        refuse_kept_names(fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        said({"type": "text", "text": "file_id"}),
        said({"type": "tool_use", "id": "t", "name": "f", "input": {"file_id": "mine"}}, role="assistant"),
        said({"type": "bash_code_execution_tool_result", "content": [{"file_id": "told"}]}, role="assistant"),
        {"tools": [{"name": "f", "input_schema": {"properties": {"file_id": "x"}, "file_id": "y"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"container": "x"}}}]},
        {"container": {"skills": [{"skill_id": "pptx"}]}},
        {"messages": "none", "tools": None, "container": None},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": None, "file_data": "x"}}]}]},
    ],
)
def test_what_names_nothing_passes(fields: dict[str, Any]) -> None:
    refuse_kept_names(fields)
