"""What `CallLog` writes, read back as `agentspec cache replay` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tools import tool

from agentspec.errors import ConfigurationError, OverloadedError
from agentspec.langchain import CallLog, ChatAgentSpec
from agentspec.recordings.formats import read
from agentspec.runtime import Runtime
from agentspec.step import step
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Labels

pytestmark = pytest.mark.anyio


@tool
def look(city: str) -> str:
    """Look a city up."""
    return city


def logged(path: Path, *script: Any) -> ChatAgentSpec:
    runtime = Runtime(backends={"fake": FakeBackend(*script)})
    return ChatAgentSpec(model="fake", runtime=runtime, max_retries=0, callbacks=[CallLog(path)])


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_calls_are_read_back_with_their_labels(tmp_path: Path, asynchronous: bool) -> None:
    path = tmp_path / "calls.jsonl"
    function = {"name": "look", "arguments": '{"city": "Rome"}'}
    called = {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]}
    model = logged(
        path, Answer("sunny"), OverloadedError("busy"), Answer("", extra=called, finish_reason="tool_calls"), "fine"
    )

    @step("plan", workflow="trip", session="s1")
    async def plan(runnable: Any) -> None:
        _ = await runnable.ainvoke("Rome?") if asynchronous else runnable.invoke("Rome?")

    await plan(model)
    with pytest.raises(OverloadedError):
        await plan(model)
    await plan(model.bind_tools([look]))
    model.invoke("a\ud800b")
    first, second, lone = read(path)
    assert lone.messages[0]["content"] == "a?b" and lone.labels.workflow is None  # of a lone surrogate
    assert first.labels == second.labels == Labels("s1", "trip", "plan")
    assert (first.messages, first.answer["content"]) == ([{"role": "user", "content": "Rome?"}], "sunny")
    assert second.answer["tool_calls"][0]["function"]["name"] == "look"
    assert json.loads(path.read_text().splitlines()[1])["request"]["tools"][0]["function"]["name"] == "look"
    assert path.stat().st_mode & 0o077 == 0


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "calls.jsonl", tmp_path):
        with pytest.raises(ConfigurationError, match="name a file in a folder"):
            CallLog(path)
