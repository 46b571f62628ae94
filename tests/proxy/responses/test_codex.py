"""Codex by its wire format: what its HTTP client sends for two turns of work with its tools, and what it reads."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest

# Shared: a client of its own costs more than a request.
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
HEADERS = {
    "accept": "text/event-stream",
    "originator": "codex_cli_rs",
    "user-agent": "codex_cli_rs/0.99.0 (Linux; x86_64)",
    "session-id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "thread-id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "authorization": "Bearer key",
}
BODY: dict[str, Any] = {
    "model": "fake",
    "instructions": "You are a coding agent running in a terminal.",
    "tools": [SHELL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
FIRST: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
]


def script(request: GenerateRequest) -> Any:
    if any(message["role"] == "tool" for message in request.messages or ()):
        return "There is one file."
    function = {"name": "shell", "arguments": '{"command":["ls"]}'}
    calls = [{"index": 0, "id": "call_1", "type": "function", "function": function}]
    return Answer("", extra={"reasoning_content": "look first", "tool_calls": calls}, finish_reason="tool_calls")


class Holding(FakeBackend):
    """As a local model, whose calls are drawn by a grammar; in a free text only if `free`."""

    free = True

    def holds_calls(self, request: GenerateRequest) -> bool:
        return self.free or request.tool_choice != "auto"


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return Holding(script)


@pytest.fixture(scope="module")
def running(shared_gateway: Any, backend: FakeBackend) -> Any:
    return shared_gateway({"fake": backend})


def turn(running: Any, items: list[dict[str, Any]], **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The items that are done, which Codex keeps, and the response that ends the turn."""
    body = {**BODY, **fields, "input": items}
    answer = HTTP.post(f"{running.url}/v1/responses", json=body, headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    events = [json.loads(block.split("data: ")[1]) for block in answer.text.strip().split("\n\n")]
    for number, event in enumerate(events):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed"
    return done, events[-1]["response"]


def sent_back(item: dict[str, Any]) -> dict[str, Any]:
    """An item as Codex sends it back: without its id, and thoughts without their text."""
    kept = {key: value for key, value in item.items() if key not in ("id", "status")}
    return {"type": "reasoning", "summary": [], "encrypted_content": None} if item["type"] == "reasoning" else kept


PATCHER = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. Send the patch itself, not JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin\\n" /[^*]+/ "*** End\\n"?'},
}
SERVER = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files of the project.",
    "tools": [{"type": "function", "name": "read", "strict": False, "parameters": {"type": "object"}}, PATCHER],
}
PATCH = '*** Begin\n+"é" \\n\n*** End'


def calls_of(*functions: tuple[str, str]) -> Any:
    calls = [
        {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(functions)
    ]
    return Answer("", extra={"tool_calls": calls}, finish_reason="tool_calls")


def test_custom_tools_and_namespaces(gateway: Any) -> None:
    """Their calls come back as the client named the tools, and their results reach the model."""
    arguments = json.dumps({"input": PATCH})
    asked = [("apply_patch", arguments), ("mcp__files__read", "{}"), ("mcp__files__apply_patch", arguments)]
    backend = Holding(lambda request: "done" if len(request.messages or ()) > 3 else calls_of(*asked))
    running = gateway({"fake": backend})
    tools = [SHELL, PATCHER, SERVER]
    done, response = turn(running, FIRST, tools=tools, parallel_tool_calls=True)
    assert [(item["type"], item.get("namespace"), item["name"]) for item in done] == [
        ("custom_tool_call", None, "apply_patch"),
        ("function_call", "mcp__files", "read"),
        ("custom_tool_call", "mcp__files", "apply_patch"),
    ]
    assert done[0]["input"] == done[2]["input"] == PATCH and response["tools"] == tools
    results = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": f"result {index}"}
        for index, item in enumerate(done)
    ]
    results[0]["name"] = "apply_patch"
    turn(running, [*FIRST, *map(sent_back, done), *results], tools=tools)
    messages = list(backend.requests[-1].messages or ())
    called = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [(one["name"], json.loads(one["arguments"])) for one in called] == [
        (name, json.loads(arguments)) for name, arguments in asked
    ]
    assert [one["content"] for one in messages if one["role"] == "tool"] == ["result 0", "result 1", "result 2"]
    functions = [tool["function"] for tool in backend.requests[0].tools]
    assert [one["name"] for one in functions] == ["shell", *(name for name, _ in asked)]
    assert functions[2]["description"].startswith("Files of the project.")
    text = functions[1]["parameters"]["properties"]["input"]
    assert PATCHER["format"]["definition"] in text["description"]


def test_a_form_that_is_told_and_not_enforced_is_named(running: Any) -> None:
    body = {**BODY, "input": FIRST, "tools": [SHELL, SERVER]}
    answer = HTTP.post(f"{running.url}/v1/responses", json=body, headers=HEADERS)
    assert answer.status_code == 200 and answer.headers["x-agentspec-unenforced"] == "tools[1].tools[1].format"


def test_two_turns(running: Any, backend: FakeBackend) -> None:
    done, response = turn(running, FIRST)
    assert [item["type"] for item in done] == ["reasoning", "function_call"]
    usage = response["usage"]
    assert {"input_tokens", "output_tokens", "total_tokens"} <= usage.keys() and response["id"]
    assert "cached_tokens" in usage["input_tokens_details"] and "reasoning_tokens" in usage["output_tokens_details"]
    result = {"type": "function_call_output", "call_id": done[1]["call_id"], "output": '{"output":"a.py\\n"}'}
    done, _ = turn(running, [*FIRST, *map(sent_back, done), result])
    assert done[0]["content"][0]["text"] == "There is one file."
    messages = list(backend.requests[-1].messages or ())
    assert [message["role"] for message in messages] == ["system", "user", "user", "assistant", "tool"]
    assert messages[0]["content"].endswith("in a terminal.\n\n<permissions>")
    assert messages[3]["tool_calls"][0]["function"]["arguments"] == '{"command":["ls"]}'


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **more}


PLAN = {
    "type": "function",
    "name": "update_plan",
    "strict": False,
    "parameters": {"type": "object", "properties": {"plan": {"type": "array", "items": {"type": "object"}}}},
}
FORM = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
CALL = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "call_1"}
RECORDED: dict[str, dict[str, Any]] = {
    "several tools": {"tools": [SHELL, PLAN], "parallel_tool_calls": True},
    "no tools": {"tools": [], "parallel_tool_calls": True},
    "a form for the last message": {
        "tools": [],
        "text": {"format": {"type": "json_schema", "name": "codex_output_schema", "strict": True, "schema": FORM}},
    },
    "no thinking": {"reasoning": None, "include": [], "text": None},
    "thoughts of all turns": {"reasoning": {"effort": "low", "context": "all_turns", "mode": "standard"}},
    "another tier": {"service_tier": "priority", "reasoning": {"effort": "high", "summary": "detailed"}},
    "a compacted history": {
        "input": [said("user", "before"), said("developer", "later rules"), said("user", "a summary of the work")]
    },
    "remarks between calls": {
        "input": [*FIRST, said("assistant", "I look.", phase="commentary"), said("user", "go on")]
    },
    "notes of turns": {
        "input": [*FIRST[:2], {**FIRST[2], "internal_chat_message_metadata_passthrough": {"turn_id": "0199a213"}}]
    },
    "a result in parts": {
        "input": [
            *FIRST,
            CALL,
            {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "a.py"}]},
        ]
    },
    "ids and states": {
        "input": [
            said("user", "hi", id="msg_1", status="completed"),
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {**CALL, "id": "fc_1", "status": "completed"},
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": "a.py",
                "id": "fo_1",
                "status": "completed",
            },
        ]
    },
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_answered(running: Any, name: str) -> None:
    fields = dict(RECORDED[name])
    done, response = turn(running, fields.pop("input", FIRST), **fields)
    assert done and response["status"] == "completed"


@pytest.mark.parametrize("tool", [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}])
def test_hosted_tools_are_refused_by_name(running: Any, tool: Any) -> None:
    body = {**BODY, "input": FIRST, "tools": [SHELL, tool]}
    refused = HTTP.post(f"{running.url}/v1/responses", json=body, headers=HEADERS)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "tools[1].type" and tool["type"] in error["message"]
