"""What Claude Code sends, by its wire format: long system blocks, many tools, betas, sessions and its side requests."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from anthropic import types
from pydantic import TypeAdapter

from agentspec.testing import Answer, FakeBackend
from agentspec.types import Usage

EVENT: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
HEADERS = {
    "content-type": "application/json",
    "accept": "application/json",
    "authorization": "Bearer sk-dummy",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.160 (external, cli)",
    "x-app": "cli",
    "x-claude-code-session-id": "6c1d3a52-7b0e-4d7f-9a51-1f2e3d4c5b6a",
    "x-claude-code-agent-id": "a5f1c2",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
EPHEMERAL = {"type": "ephemeral"}
BASH = {
    "name": "Bash",
    "description": "Executes a given bash command",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
    "eager_input_streaming": True,
    "cache_control": EPHEMERAL,
}
MCP = {
    "name": "mcp__" + "very_long_server_name__" * 4 + "search",
    "input_schema": {"type": "object"},
    "defer_loading": True,
}
FIRST: dict[str, Any] = {
    "model": "m",
    "max_tokens": 64,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.160; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "# Environment\nWorking directory: /src", "cache_control": EPHEMERAL},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Sunday.\n</system-reminder>\n"},
                {"type": "text", "text": "list the files", "cache_control": EPHEMERAL},
            ],
        }
    ],
    "tools": [BASH, MCP],
    "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "6c1d3a52"})},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
CALL = {"index": 0, "id": "call_1", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}}


def post(url: str, body: Any, path: str = "/v1/messages?beta=true") -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, headers=HEADERS, timeout=60)


def events(response: httpx.Response) -> list[Any]:
    found = []
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        shown = json.loads(data.removeprefix("data: "))
        assert name == f"event: {shown['type']}"
        found.append(shown if shown["type"] == "ping" else EVENT.validate_python(shown, strict=True))
    return found


@pytest.fixture
def started(gateway: Any) -> tuple[str, FakeBackend]:
    thought = {"reasoning_content": "I should list them.", "tool_calls": [CALL]}
    answers = Answer("", extra=thought, finish_reason="tool_calls", usage=Usage(30, 9)), Answer("Two files.")
    backend = FakeBackend(*answers)
    return gateway({"m": backend}).url, backend


@pytest.fixture(scope="module")
def shared(shared_gateway: Any) -> tuple[str, FakeBackend]:
    backend = FakeBackend(lambda request: Answer("Done.", extra={"reasoning_content": "Hm."}))
    return shared_gateway({"m": backend}).url, backend


def test_a_turn_with_a_tool_and_the_next(started: tuple[str, FakeBackend]) -> None:
    url, backend = started
    response = post(url, FIRST)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    blocks = [event.content_block.type for event in events(response) if getattr(event, "content_block", None)]
    assert blocks == ["thinking", "tool_use"]
    first = backend.requests[0]
    assert [message["role"] for message in first.messages or ()] == ["system", "user"]
    assert [tool["function"]["name"] for tool in first.tools] == ["Bash", MCP["name"]]
    assert first.template_arguments == {"enable_thinking": True, "reasoning_effort": "medium"}
    history = [
        *FIRST["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should list them.", "signature": "5f"},
                {
                    "type": "tool_use",
                    "id": "call_1",
                    "name": "Bash",
                    "input": {"command": "ls"},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "a\nb", "is_error": False},
                {
                    "type": "text",
                    "text": "<system-reminder>\nNo todos.\n</system-reminder>",
                    "cache_control": EPHEMERAL,
                },
            ],
        },
    ]
    second = events(post(url, {**FIRST, "messages": history}))
    assert (
        "".join(event.delta.text for event in second if getattr(event, "type", "") == "content_block_delta")
        == "Two files."
    )
    roles = [message["role"] for message in backend.requests[1].messages or ()]
    assert roles == ["system", "user", "assistant", "tool", "user"]


def test_its_side_requests(started: tuple[str, FakeBackend]) -> None:
    url, _ = started
    quota = {
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "quota"}],
        "metadata": FIRST["metadata"],
    }
    assert post(url, quota).status_code == 200
    title = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    form = {"format": {"type": "json_schema", "schema": title}}
    asked = {**quota, "max_tokens": 32, "temperature": 1, "tools": [], "output_config": form}
    assert post(url, asked).status_code == 200
    counted = {name: FIRST[name] for name in ("model", "messages", "system", "tools", "thinking")}
    answer = post(url, counted, "/v1/messages/count_tokens?beta=true")
    assert types.MessageTokensCount.model_validate(answer.json(), strict=True).input_tokens > 10


GLOBAL = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
LOADED = {"type": "tool_reference", "tool_name": "mcp__search"}
CALLED = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {}, "cache_control": EPHEMERAL}
RECORDED: dict[str, dict[str, Any]] = {
    "adaptive thinking with a budget of none": {"thinking": {"type": "adaptive", "budget_tokens": 0}},
    "thinking bound to blocks": {"thinking": {"type": "adaptive", "block_binding": "strict", "display": "omitted"}},
    "a budget": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "scopes of its cache": {"system": [{"type": "text", "text": "s", "cache_control": GLOBAL}]},
    "another effort from here": {
        "messages": [
            *FIRST["messages"],
            {"role": "system", "content": [], "output_config": {"effort": "xhigh"}},
            {"role": "user", "content": "go on"},
        ]
    },
    "a failed tool, and one that was looked up": {
        "messages": [
            *FIRST["messages"],
            {"role": "assistant", "content": [CALLED, {**CALLED, "id": "t2"}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "boom"},
                    {"type": "tool_result", "tool_use_id": "t2", "content": [LOADED], "cache_control": GLOBAL},
                ],
            },
        ]
    },
    "thoughts that nobody can read": {
        "messages": [
            *FIRST["messages"],
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "Ev"}, {"type": "text", "text": "a"}],
            },
            {"role": "user", "content": "go on"},
        ]
    },
    "a beginning for the answer": {"messages": [*FIRST["messages"], {"role": "assistant", "content": "{"}]},
    "settings of the service": {"speed": "standard", "inference_geo": "us", "mcp_servers": [], "service_tier": "auto"},
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_answered(shared: tuple[str, FakeBackend], name: str) -> None:
    url, backend = shared
    response = post(url, {**FIRST, **RECORDED[name]})
    assert response.status_code == 200, response.text
    kinds = [event["type"] if isinstance(event, dict) else event.type for event in events(response)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    effort = "high" if name == "another effort from here" else "medium"
    assert backend.requests[-1].template_arguments["reasoning_effort"] == effort


def test_an_effort_that_does_not_exist_is_named(shared: tuple[str, FakeBackend]) -> None:
    for config, param in (({"effort": "odd"}, "effort"), ({"format": {"type": "odd"}}, "format")):
        wrong = {"role": "system", "content": [], "output_config": config}
        refused = post(shared[0], {**FIRST, "messages": [*FIRST["messages"], wrong]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == f"messages[1].output_config.{param}"
    alone = post(shared[0], {**FIRST, "messages": [{"role": "system", "content": [], "output_config": {}}]})
    assert alone.status_code == 400 and alone.json()["error"]["param"] == "messages"


def test_tools_of_anthropics_servers_are_refused_by_name(started: tuple[str, FakeBackend]) -> None:
    url, _ = started
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    refused = post(url, {**FIRST, "tools": [search], "tool_choice": {"type": "tool", "name": "web_search"}})
    assert refused.status_code == 400 and "web_search_20250305" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "tools[0].type"
