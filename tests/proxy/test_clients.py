"""Agent frameworks pointed at the gateway, unmodified, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest

HELLO, DEGREES = "Hello there.", "It has 23.75 degrees."
PROGRAMS = Path(__file__).parent / "client_programs.py"
ENVIRONMENT = Path(os.environ.get("AGENTSPEC_CLIENTS_ENV") or PROGRAMS.parents[2] / ".venv-clients")
PYTHON = ENVIRONMENT / "bin" / "python"
NAMES = "pydantic-ai, smolagents, llama-index and autogen"


def script(request: GenerateRequest) -> Any:
    """Calls the tool, then says what it said, by the tool for answers where there is one; fills in a form by itself."""
    said = json.dumps([dict(message) for message in request.messages or ()])
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.tools}
    form = json.dumps({"place": "Rome", "degrees": 23.75})
    if request.sampling.structured_outputs is not None:
        return form
    if "temperature" in tools and "23.75" not in said:
        return called("temperature", json.dumps({"place": "Rome"}))
    if "final_answer" in tools:
        return called("final_answer", json.dumps({"answer": DEGREES}))
    if "final_result" in tools:
        return called("final_result", form)
    return DEGREES if "23.75" in said else HELLO


def called(name: str, arguments: str) -> Answer:
    calls = [{"index": 0, "id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return Answer("", extra={"tool_calls": calls}, finish_reason="tool_calls")


BOTH = {"text": HELLO, "tool": DEGREES, "form": {"place": "Rome", "degrees": 23.75}, "stream": HELLO}


@pytest.mark.long
@pytest.mark.skipif(not PYTHON.exists(), reason=f"no {NAMES}: run .ci/clients-env, or set AGENTSPEC_CLIENTS_ENV")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pydantic-ai-slim", {"OpenAIChatModel": BOTH, "OpenAIResponsesModel": BOTH}),
        ("smolagents", {"tool": DEGREES}),
        ("llama-index-llms-openai", {"text": HELLO, "stream": HELLO}),
        ("autogen-agentchat", {"tool": DEGREES}),
    ],
)
def test_frameworks_in_their_own_environment(gateway: Any, name: str, expected: dict[str, Any]) -> None:
    running = gateway({"fake": FakeBackend(script), "gpt-4o-mini": FakeBackend(script)})
    command = [str(PYTHON), str(PROGRAMS), name, f"{running.url}/v1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print(name, found.pop("version"))
    assert found == expected
