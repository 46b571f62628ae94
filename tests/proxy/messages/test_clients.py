"""The unmodified client of Anthropic and the requests of Claude Code, against scripted backends.

What each body asks for is in `tests/protocol/golden/messages.jsonl`, recorded requests of Claude Code among them.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from anthropic import types
from pydantic import TypeAdapter

from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Usage

EVENT: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": FUNCTION}
ASKED = [{"role": "user", "content": "Hello"}]


def client_of(running: Any, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0, timeout=60)


def ask(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    return client.messages.create(**{"model": "m", "max_tokens": 50, "messages": ASKED, **fields})


@pytest.fixture
def scripted(gateway: Any, closing: Any) -> Any:
    """A gateway whose model "m" answers from a script, its client, and the backend."""

    def start(*script: Any, **server: Any) -> tuple[anthropic.Anthropic, FakeBackend]:
        backend = FakeBackend(*script)
        return closing(client_of(gateway({"m": backend}, **server))), backend

    return start


def test_thoughts_are_blocks_and_may_come_back(scripted: Any) -> None:
    thought = {"reasoning_content": "Hm.", "reasoning": "Hm."}
    client, backend = scripted(lambda request: Answer("Yes.", extra=thought))
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive", "budget_tokens": 9}):
        message = ask(client, thinking=thinking)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "Hm." and message.content[0].signature
    ask(client, messages=[*ASKED, {"role": "assistant", "content": message.content}, *ASKED])
    assert backend.requests[-1].messages[1]["reasoning_content"] == "Hm."
    assert [block.type for block in ask(client, thinking={"type": "disabled"}).content] == ["text"]
    assert backend.requests[0].template_arguments == {"enable_thinking": True}
    assert backend.requests[-1].template_arguments == {"enable_thinking": False}
    assert [request.thinking_budget for request in backend.requests] == [1024, 9, None, None]


def test_errors_are_those_of_anthropics_api(scripted: Any) -> None:
    client, _ = scripted("ok")
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(client, messages=[{"role": "user", "content": [{"type": "video", "source": {}}]}])
    assert bad.value.body["type"] == "error" and bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.body["error"]["param"] == "messages[0].content[0].type" and bad.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"


# Claude Code ---------------------------------------------------------------------------------------------------------

HEADERS = {
    "authorization": "Bearer sk-dummy",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "user-agent": "claude-cli/2.1.160 (external, cli)",
    "x-claude-code-session-id": "6c1d3a52-7b0e-4d7f-9a51-1f2e3d4c5b6a",
    "x-stainless-timeout": "600",
}
EPHEMERAL = {"type": "ephemeral"}
BASH = {"name": "Bash", "input_schema": SCHEMA, "eager_input_streaming": True, "cache_control": EPHEMERAL}
LONG = "mcp__" + "very_long_server_name__" * 4 + "search"
MCP = {"name": LONG, "input_schema": {"type": "object"}, "defer_loading": True}
FIRST: dict[str, Any] = {
    "model": "m",
    "max_tokens": 64,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.160; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "# Environment\nWorking directory: /src", "cache_control": EPHEMERAL},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "list", "cache_control": EPHEMERAL}]}],
    "tools": [BASH, MCP],
    "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "6c1d3a52"})},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}


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


def test_two_turns_and_the_side_requests_of_claude_code(gateway: Any) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}}
    thought = {"reasoning_content": "I should list them.", "tool_calls": [call]}
    first = Answer("", extra=thought, finish_reason="tool_calls", usage=Usage(30, 9))
    backend = FakeBackend(first, "Two files.", "quota", '{"title": "Files"}')
    url = gateway({"m": backend}).url
    response = post(url, FIRST)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    blocks = [event.content_block for event in events(response) if getattr(event, "content_block", None)]
    assert [block.type for block in blocks] == ["thinking", "tool_use"]
    asked = backend.requests[0]
    assert [tool["function"]["name"] for tool in asked.tools] == ["Bash", MCP["name"]]
    assert asked.template_arguments == {"enable_thinking": True, "reasoning_effort": "medium"}
    written = [
        {"type": "thinking", "thinking": "I should list them.", "signature": "5f"},
        {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "ls"}, "caller": {"type": "direct"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "a\nb", "is_error": False}
    history = [{"role": "assistant", "content": written}, {"role": "user", "content": [result]}]
    second = events(post(url, {**FIRST, "messages": [*FIRST["messages"], *history]}))
    deltas = [event.delta for event in second if getattr(event, "type", "") == "content_block_delta"]
    assert "".join(delta.text for delta in deltas) == "Two files."
    roles = [message["role"] for message in backend.requests[1].messages or ()]
    assert roles == ["system", "user", "assistant", "tool"]
    quota = {"model": "m", "max_tokens": 1, "messages": ASKED, "metadata": FIRST["metadata"]}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    for body in (quota, {**quota, "max_tokens": 32, "temperature": 1, "tools": [], "output_config": form}):
        assert post(url, body).status_code == 200
    counted = {name: FIRST[name] for name in ("model", "messages", "system", "tools", "thinking")}
    answer = post(url, counted, "/v1/messages/count_tokens?beta=true")
    assert types.MessageTokensCount.model_validate(answer.json(), strict=True).input_tokens > 10


LINE = "x-anthropic-billing-header: cc_version=2.1.160; cc_entrypoint=cli; cch={};"
RULES = "You look after a house."


def texts(*said: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one, **more} for one in said]


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


CHANGING: dict[str, tuple[str, Any]] = {
    "first of several blocks": ("messages", {"system": texts(LINE, RULES)}),
    "a block to be cached": ("messages", {"system": texts(LINE, RULES, cache_control=EPHEMERAL)}),
    "a string": ("messages", {"system": f"{LINE}\n\n{RULES}"}),
    "one line with the rules": ("messages", {"system": f"{LINE} {RULES}"}),
    "a chat": ("chat/completions", {"messages": [system(f"{LINE}\n{RULES}")]}),
    "a chat's message of its own": ("chat/completions", {"messages": [system(LINE), system(RULES)]}),
    "a chat's parts": ("chat/completions", {"messages": [system(texts(LINE, RULES))]}),
    "instructions": ("responses", {"instructions": f"{LINE}\n{RULES}"}),
    "an item": ("responses", {"input": [system(f"{LINE}\n{RULES}")]}),
}


def asked(path: str, given: Any, value: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(json.dumps({"model": "m", **given}).replace("{}", value))
    where = "input" if path == "responses" else "messages"
    body[where] = [*body.get(where, ()), {"role": "user", "content": f"Is {LINE} a header?"}]
    return body | ({"max_tokens": 9} if path == "messages" else {})


@pytest.mark.parametrize(("path", "given"), CHANGING.values(), ids=CHANGING)
def test_a_line_that_changes_with_every_request_stays_out_of_prompts(
    gateway: Any, upstream: Any, path: str, given: Any
) -> None:
    """Here and at upstreams that are not Anthropic's; what a user says of it stays."""
    fake, theirs = FakeBackend("a", "b"), list[bytes]()
    server = upstream(lambda request: request.answer(b"{}", 400 if request.body == b"{}" else 200))

    def answer(request: Any) -> Any:
        theirs.append(request.content)
        return httpx2.Response(400 if request.content == b"{}" else 200, json={})

    settings = OpenAISettings(base_url="https://api.anthropic.com/v1", server_kind="other")  # type: ignore[arg-type]
    own = OpenAIBackend(settings, transport=httpx2.MockTransport(answer))
    running = gateway({"m": fake, "up": server.backend(server_kind="other"), "own": own})
    for value in ("3fa91", "c07de"):
        body = asked(path, given, value)
        for model in ("m", "up", "own"):
            assert httpx.post(f"{running.url}/v1/{path}", json={**body, "model": model}).status_code == 200
    said = [[str(message["content"]) for message in request.messages or ()] for request in fake.requests]
    assert said[0] == said[1] and RULES in said[0][0] and LINE in said[0][-1]
    first, second = (one.body for one in server.requests if one.method == "POST" and one.body != b"{}")
    assert first == second and first.count(b"billing-header") == 1 and RULES.encode() in first
    assert value.encode() in theirs[-1] and theirs[-1].count(b"billing-header") == 2
