"""`/v1/responses` as its clients use it: OpenAI's, and Codex by its wire format.

What each body asks for is in `tests/protocol/golden/responses.jsonl`, recorded requests of Codex among them.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.backends.base import Capabilities
from agentspec.testing import Answer, FakeBackend

# Shared: a client of its own costs more than a request.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MODEL = "fake"


def calls_of(*functions: tuple[str, str], **extra: Any) -> Answer:
    """An answer that calls tools by their names, with arguments."""
    calls = [
        {"index": at, "id": f"{name}_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(functions)
    ]
    return Answer("", extra={**extra, "tool_calls": calls}, finish_reason="tool_calls")


# Wrong fields --------------------------------------------------------------------------------------------------------

TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def running(shared_gateway: Any) -> Any:
    return shared_gateway({MODEL: FakeBackend("fine", capabilities=Capabilities(context_length=200))})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "word " * 201}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ],
)
def test_refusals_name_the_fields_of_responses(running: Any, fields: dict[str, Any], param: str) -> None:
    response = HTTP.post(f"{running.url}/v1/responses", json={"model": MODEL, "input": "hi", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


WEB: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
SEARCHED = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}}
LISTED = {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": [{"name": "f"}]}
ADDED = {"type": "additional_tools", "role": "developer"}
ASKED: Any = {"role": "user", "content": "hi"}
SERVER_USE = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
ANSWERED = {"role": "assistant", "content": [SERVER_USE, FOUND, {"type": "text", "text": "found"}]}
HOSTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a tool after a function": ("responses", {"tools": [TOOL, {"type": "web_search"}]}, "web_search"),
    "a chosen tool": (
        "responses",
        {"tools": [TOOL, {"type": "file_search", "vector_store_ids": ["v"]}], "tool_choice": {"type": "file_search"}},
        "file_search",
    ),
    "one tool, and what it is to show": (
        "responses",
        {
            "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}],
            "tool_choice": "required",
            "include": ["code_interpreter_call.outputs"],
        },
        "code_interpreter",
    ),
    "items of calls": ("responses", {"input": [SEARCHED, LISTED, ASKED]}, "mcp_list_tools, web_search_call"),
    "a tool of an item": ("responses", {"input": [{**ADDED, "tools": [TOOL, {"type": "shell"}]}, ASKED]}, "shell"),
    "the only tool of an item": ("responses", {"input": [{**ADDED, "tools": [{"type": "mcp"}]}, ASKED]}, "mcp"),
    "Anthropic's": ("messages", {"tools": [WEB], "tool_choice": {"type": "tool", "name": "web_search"}}, WEB["type"]),
    "blocks of calls": (
        "messages",
        {"messages": [ASKED, ANSWERED, {**ANSWERED, "content": [FOUND]}, ASKED]},
        "server_tool_use, web_search_tool_result",
    ),
    "a tool of a chat": ("chat/completions", {"tools": [{"type": "computer_use_preview"}]}, "computer_use_preview"),
    "a search of a chat": ("chat/completions", {"web_search_options": {"user_location": {}}}, "web_search_options"),
}


@pytest.mark.parametrize(("path", "fields", "named"), HOSTED.values(), ids=HOSTED)
def test_hosted_tools_and_their_calls_are_refused_or_dropped(
    gateway: Any, running: Any, path: str, fields: dict[str, Any], named: str
) -> None:
    said = {"input": "hi"} if path == "responses" else {"messages": [ASKED], "max_tokens": 9}
    body = {"model": MODEL, **said, **fields}
    refused = HTTP.post(f"{running.url}/v1/{path}", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"].partition("[")[0] in (*fields, "tools")
    backend = FakeBackend("fine")
    answer = HTTP.post(f"{gateway({MODEL: backend}, hosted_tools='drop').url}/v1/{path}", json=body)
    assert (answer.status_code, answer.headers["x-agentspec-dropped"]) == (200, named), answer.text
    [request] = backend.requests
    assert [tool["function"]["name"] for tool in request.tools] == (["look"] if str(TOOL) in str(fields) else [])
    texts = [message["content"] for message in request.messages or ()]
    assert texts == (["hi", "found", "hi"] if named.startswith("server") else ["hi"])


def test_tokens_of_a_prompt_are_counted(running: Any) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        count = client.responses.input_tokens.count
        short, long = (
            count(model=MODEL, input="hi"),
            count(model=MODEL, input="hi", instructions="be brief", tools=[TOOL]),
        )
        assert short.object == "response.input_tokens" and 0 < short.input_tokens < long.input_tokens
        stored = client.responses.create(model=MODEL, input="a long story " * 9)
        assert count(model=MODEL, input="hi", previous_response_id=stored.id).input_tokens > short.input_tokens
        with pytest.raises(openai.NotFoundError):
            count(model=MODEL, input="hi", previous_response_id="resp_unknown")


def test_a_compacted_conversation_goes_on(gateway: Any) -> None:
    backend = FakeBackend("Blue was chosen. \u00e9%", "on")
    url = f"{gateway({MODEL: backend}).url}/v1"
    items: Any = [{"role": "user", "content": "red?"}, {"role": "assistant", "content": "no, blue"}]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        made = client.responses.compact(model=MODEL, input=items, instructions="be brief")
        assert made.object == "response.compaction" and made.usage.output_tokens > 0
        assert [one.type for one in made.output] == ["message", "compaction"]
        output: Any = [one.model_dump(exclude_none=True, warnings=False) for one in made.output]
        client.responses.create(model=MODEL, input=[*output, {"role": "user", "content": "which?"}])
        foreign: Any = [{"type": "compaction", "encrypted_content": "gAAA"}, *items]
        with pytest.raises(openai.BadRequestError, match="was not compacted here"):
            client.responses.create(model=MODEL, input=foreign)
    asked, went_on = ([message["content"] for message in request.messages or ()] for request in backend.requests)
    assert asked[:3] == ["be brief", "red?", "no, blue"] and asked[3].startswith("Summarize")
    assert went_on == ["red?", "Summary of the conversation so far:\n\nBlue was chosen. \u00e9%", "which?"]
    for wrong in ({"input": 5}, {"stream": True, "input": "hi"}, {}):
        refused = HTTP.post(f"{url}/responses/compact", json={"model": MODEL, **wrong})
        assert refused.status_code == 400, refused.text


# Codex ---------------------------------------------------------------------------------------------------------------

COMMAND = {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}
SHELL = {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": COMMAND}
HEADERS = {
    "accept": "text/event-stream",
    "originator": "codex_cli_rs",
    "user-agent": "codex_cli_rs/0.99.0 (Linux; x86_64)",
    "session-id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "thread-id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "authorization": "Bearer key",
}
BODY: dict[str, Any] = {
    "model": MODEL,
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
    left = {key: value for key, value in item.items() if key not in ("id", "status")}
    return {"type": "reasoning", "summary": [], "encrypted_content": None} if item["type"] == "reasoning" else left


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


def test_custom_tools_and_namespaces(gateway: Any) -> None:
    """Their calls come back as the client named the tools, and their results reach the model."""
    arguments = json.dumps({"input": PATCH})
    asked = [("apply_patch", arguments), ("mcp__files__read", "{}"), ("mcp__files__apply_patch", arguments)]
    backend = FakeBackend(lambda request: "done" if len(request.messages or ()) > 3 else calls_of(*asked))
    running = gateway({MODEL: backend})
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


def test_two_turns_of_codex(gateway: Any) -> None:
    called = calls_of(("shell", '{"command":["ls"]}'), reasoning_content="look first")
    backend = FakeBackend(called, "There is one file.", "said")
    running = gateway({MODEL: backend})
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
