"""Agent frameworks pointed at the gateway, unmodified: LangChain here, others in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import Settings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest

HELLO, DEGREES = "Hello there.", "It has 23.75 degrees."
PROGRAMS = Path(__file__).parent / "client_programs.py"
ENVIRONMENT = Path(os.environ.get("AGENTSPEC_CLIENTS_ENV") or PROGRAMS.parents[2] / ".venv-clients")
PYTHON = ENVIRONMENT / "bin" / "python"
NAMES = "pydantic-ai, smolagents, llama-index and autogen"


@pytest.fixture(params=["backend", "upstream"])
def chat(gateway: Any, request: pytest.FixtureRequest) -> Any:
    """On a gateway in front of a backend, and on one more gateway, to which that one is the upstream."""
    langchain_openai = pytest.importorskip("langchain_openai")
    running = gateway({"fake": FakeBackend("brave new wörld")})
    if request.param == "upstream":
        upstream: Any = OpenAISettings(base_url=f"{running.url}/v1")  # type: ignore[arg-type]
        running = gateway({}, Settings(backends={"up": upstream}))
    return langchain_openai.ChatOpenAI(
        model="fake", base_url=f"{running.url}/v1", api_key=SecretStr("none"), max_retries=0, stream_usage=True
    )


def test_invoke(chat: Any) -> None:
    answer = chat.invoke([("system", "be short"), ("human", "hi")])
    assert answer.content == "brave new wörld"
    assert answer.usage_metadata["input_tokens"] == 3 and answer.usage_metadata["output_tokens"] == 3
    assert answer.response_metadata["model_name"] == "fake" and answer.response_metadata["finish_reason"] == "stop"


def test_stream(chat: Any) -> None:
    chunks = list(chat.stream("hi", stop=["nothing"], temperature=0.0, max_tokens=9, seed=3))
    assert [chunk.content for chunk in chunks if chunk.content] == ["brave", " new", " wörld"]
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata["total_tokens"] == 4


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
