"""Messages for upstreams: bytes where they speak the API, chats where they do not, and every failure in its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.proxy.upstreams import chats, posted, scripted, settings

PATH = "/v1/messages"
BODY = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
NATIVE = [
    f"event: {name}\ndata: {data}\n\n".encode()
    for name, data in (
        ("message_start", '{"type":"message_start","message":{"id":"m1","usage":{"input_tokens":3}}, "odd":1.10}'),
        ("ping", '{"type": "ping"}'),
        ("content_block_delta", '{"type":"content_block_delta","delta":{"type":"text_delta","text":"\\"error\\""}}'),
        ("message_delta", '{"type":"message_delta","usage":{"output_tokens":4,"cache_read_input_tokens":2}}'),
        ("message_stop", '{"type":"message_stop"}'),
    )
]


def post(running: Any, body: Any = BODY, path: str = PATH, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{running.url}{path}", content=content, headers={"content-type": "application/json", **headers}, timeout=60
    )


def native(answer: Any) -> Any:
    """A server that has the route."""
    return scripted(answer, PATH)


def stream(request: Any, events: list[bytes]) -> None:
    request.head()
    request.send(b"".join(events))


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_an_upstream_with_the_route_gets_and_sends_bytes(gateway: Any, upstream: Any, kind: str) -> None:
    whole = b' {"id":"m","usage":{"input_tokens":3,"output_tokens":2,"cache_read_input_tokens":1}, "odd":1.10}'
    answer = whole if kind == "application/json" else b"".join(NATIVE)
    server = upstream(native(lambda request: request.answer(answer, 200, kind)))
    running = gateway({}, settings(server.url))
    sent = b' {"model":"m","max_tokens":20, "temperature":1.10,"messages":[{"role":"user","content":"https://x.y"}]}'
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "mine"}
    for _ in range(2):
        response = post(running, sent, f"{PATH}?beta=true", **headers)
        assert response.content == answer and "x-agentspec-translated" not in response.headers
    first, _ = posted(server)
    assert first.body == sent and first.target == f"{PATH}?beta=true"
    assert {name: first.headers[name] for name in headers} == headers
    assert sum(request.body == b"{}" for request in server.requests) == 1  # it is asked once
    tokens = [running.metric(f"agentspec_{one}_tokens_total", model="m") for one in ("prompt", "completion")]
    assert tokens == ([8, 4] if answer is whole else [10, 8])


def test_the_operators_key_goes_where_the_route_looks_for_it(gateway: Any, upstream: Any) -> None:
    server = upstream(native(lambda request: request.answer(b"{}")))
    running = gateway({}, settings(server.url, api_key="operators"))
    post(running, **{"x-api-key": "clients"})
    [request] = posted(server)
    assert request.headers["x-api-key"] == "operators" and request.headers["authorization"] == "Bearer operators"


def test_a_chat_is_asked_for_and_answered_as_a_message(gateway: Any, upstream: Any) -> None:
    said = {"role": "assistant", "content": "Hi"}
    answer = {
        "choices": [{"index": 0, "message": said, "finish_reason": "stop", "stop_reason": "END"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    server = upstream(chats(lambda request: request.answer(json.dumps(answer).encode())))
    running = gateway({}, settings(server.url))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    content = [{"type": "text", "text": "What is this?"}, image]
    headers = {"x-api-key": "mine", "anthropic-version": "2023-06-01", "traceparent": "00-1-2-03"}
    asked = {
        **BODY,
        "messages": [{"role": "user", "content": content}],
        "stop_sequences": ["END"],
        "system": "Be brief.",
    }
    response = post(running, {**asked, "thinking": {"type": "adaptive"}}, f"{PATH}?beta=true", **headers)
    assert response.headers["x-agentspec-translated"] == "chat.completions"
    message = anthropic.types.Message.model_validate(response.json())
    assert message.content[0].text == "Hi" and (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    [request] = posted(server)
    assert request.target == "/v1/chat/completions" and request.headers["authorization"] == "Bearer mine"
    assert "anthropic-version" not in request.headers and "x-api-key" not in request.headers
    assert request.headers["traceparent"] == "00-1-2-03"
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    assert request.json == {
        "model": "m",
        "max_tokens": 20,
        "stop": ["END"],
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [content[0], url]}],
    }


LONG = ["mcp__" + "a" * 70 + end for end in ("1", "2")]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("owner", ["other", "vllm"])
def test_names_of_tools_are_as_long_as_the_upstream_takes(
    gateway: Any, upstream: Any, streamed: bool, owner: str
) -> None:
    """OpenAI's servers take 64 characters, Anthropic's more, and agents use them; a chat template takes any name."""

    def answer(request: Any) -> None:
        name = request.json["tools"][1]["function"]["name"]
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
        choice = {"index": 0, "delta" if streamed else "message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
        whole = json.dumps({"choices": [choice]}).encode()
        stream(request, [b"data: " + whole + b"\n\n"]) if streamed else request.answer(whole)

    server = upstream(chats(answer, owner))
    running = gateway({}, settings(server.url))
    call = {"type": "tool_use", "id": "a", "name": LONG[0], "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
    asked = {
        **BODY,
        "tools": [{"name": name, "input_schema": {"type": "object"}} for name in (*LONG, "f")],
        "tool_choice": {"type": "tool", "name": LONG[1]},
        "messages": [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
        "stream": streamed,
    }
    assert LONG[1].encode() in post(running, asked).content
    [request] = posted(server)
    names = [tool["function"]["name"] for tool in request.json["tools"]]
    assert len(set(names)) == 3 and names[2] == "f"
    assert all(len(name) <= 64 for name in names) if owner == "other" else names[:2] == LONG
    assert request.json["messages"][0]["tool_calls"][0]["function"]["name"] == names[0]
    assert request.json["tool_choice"]["function"]["name"] == names[1]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_is_text_and_why_the_answer_ended(gateway: Any, upstream: Any, streamed: bool) -> None:
    """A stream tells the refusal before the chunk that ends it."""
    pieces = [{"delta": {"refusal": text}} for text in ("I can", "not.")]
    chunks = [*pieces, {"delta": {}, "finish_reason": "stop"}]
    events = [b"data: " + json.dumps({"choices": [{"index": 0, **one}]}).encode() + b"\n\n" for one in chunks]
    whole = {"choices": [{"message": {"content": None, "refusal": "I cannot."}, "finish_reason": "stop"}]}

    def script(request: Any) -> None:
        stream(request, events) if streamed else request.answer(json.dumps(whole).encode())

    running = gateway({}, settings(upstream(chats(script)).url))
    answer = post(running, {**BODY, "stream": streamed}).text
    assert '"stop_reason":"refusal"' in answer and ("I can" in answer)
    body = {"model": "m", "input": "hi", "stream": streamed}
    answer = post(running, body, "/v1/responses").text
    assert '"incomplete_details":null' in answer and '"refusal":"I cannot."' in answer
    assert ("response.refusal.done" in answer) == streamed


def test_a_server_that_applies_a_template_gets_its_arguments(gateway: Any, upstream: Any) -> None:
    server = upstream(chats(lambda request: request.answer(b'{"choices":[{"finish_reason":"stop"}]}'), "vllm"))
    running = gateway({}, settings(server.url))
    said = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So"}],
    }
    post(running, {**BODY, "messages": [*BODY["messages"], said], "thinking": {"type": "disabled"}})  # type: ignore[misc]
    [request] = posted(server)
    assert request.json["messages"][1] == {"role": "assistant", "content": "So", "reasoning_content": "Hm."}
    assert request.json["continue_final_message"] is True and request.json["add_generation_prompt"] is False
    assert request.json["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_thoughts_of_a_tool_loop_go_back_to_servers_that_are_asked_for_chats(
    gateway: Any, upstream: Any, path: str, streamed: bool
) -> None:
    server = upstream(chats(lambda request: request.answer(b'{"choices":[{"finish_reason":"stop","message":{}}]}')))
    said: list[Any] = []
    items: list[Any] = []
    for n in range(3):
        if n < 2:
            said.append({"role": "user", "content": "go"})
            items.append(said[-1])
        thought = {"type": "thinking", "thinking": f"t{n}", "signature": "s"}
        call = {"type": "tool_use", "id": f"c{n}", "name": "f", "input": {}}
        said.append({"role": "assistant", "content": [thought, call]})
        said.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{n}", "content": "1"}]})
        items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": f"t{n}"}]})
        items.append({"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{n}", "output": "1"})
    body = {**BODY, "messages": said} if path == "/v1/messages" else {"model": "m", "input": items}
    post(gateway({}, settings(server.url)), {**body, "stream": streamed}, path)
    [request] = posted(server)
    thoughts = [one.get("reasoning_content") for one in request.json["messages"] if one["role"] == "assistant"]
    assert thoughts == [None, "t1", "t2"]


def test_a_hosted_model_continues_no_message(gateway: Any, upstream: Any) -> None:
    server = upstream(chats(lambda request: request.answer(b"{}")))
    said = {"role": "assistant", "content": "So"}
    response = post(gateway({}, settings(server.url)), {**BODY, "messages": [*BODY["messages"], said]})  # type: ignore[misc]
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages") and not posted(server)


def test_messages_of_tenants_are_salted_even_if_the_upstream_has_the_route(
    gateway: Any, upstream: Any, tmp_path: Path
) -> None:
    def both(request: Any) -> None:
        answer = b'{"choices":[{"finish_reason":"stop"}]}' if "chat" in request.target else b'{"error":{}}'
        request.answer(b'{"data":[{"id":"x","owned_by":"vllm"}]}' if request.method == "GET" else answer, 200)

    server = upstream(both)
    running = gateway({}, settings(server.url, tmp_path))
    for tenant in ("alice", "bob"):
        translated = post(running, **{"x-api-key": f"key-of-{tenant}"}).headers["x-agentspec-translated"]
        assert translated == "chat.completions"
    salts = [request.json["cache_salt"] for request in posted(server)]
    assert len(set(salts)) == 2 and all(len(salt) == 64 for salt in salts)
    assert all("x-api-key" not in request.headers for request in server.requests)


def test_keys_are_taken_as_anthropics_clients_send_them(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(chats(lambda request: request.answer(b'{"choices":[{"finish_reason":"stop"}]}'), "vllm"))
    running = gateway({}, settings(server.url, tmp_path))
    mine, no = "key-of-alice", "no"
    for given in ({"x-api-key": mine}, {"authorization": f"Bearer {mine}", "x-api-key": no}):
        assert post(running, **given).status_code == 200
    for wrong in ({}, {"x-api-key": no}, {"authorization": "Bearer no", "x-api-key": mine}):
        refused = post(running, **wrong)
        assert refused.status_code == 401 and refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "authentication_error" and refused.headers["request-id"]
    unknown = post(running, path="/v1/messages/nothing", **{"x-api-key": mine})
    assert unknown.json()["error"]["type"] == "not_found_error"
    assert "type" not in post(running, path="/v1/nothing", **{"x-api-key": mine}).json()


def test_tokens_are_counted_where_the_upstream_can(gateway: Any, upstream: Any) -> None:
    def vllm(request: Any) -> None:
        if request.target == "/tokenize":
            request.answer(b'{"tokens":[1,2,3,4]}')
        else:
            chats(lambda one: one.answer(b"{}"), "vllm")(request)

    path = f"{PATH}/count_tokens"
    server = upstream(vllm)
    asked = {"model": "m", "messages": BODY["messages"], "system": "Be brief."}
    counted = post(gateway({}, settings(server.url)), asked, path)
    assert counted.json() == {"input_tokens": 4}
    begun = asked | {"messages": [*BODY["messages"], {"role": "assistant", "content": "So"}]}
    assert post(gateway({}, settings(server.url)), begun, path).json() == {"input_tokens": 8}
    assert server.requests[-1].json["prompt"] == "So"
    asked_for = {"model": "m", "input": "hi", "instructions": "Be brief."}
    counted = post(gateway({}, settings(server.url)), asked_for, "/v1/responses/input_tokens")
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 4}
    assert server.requests[-1].json["messages"][0] == {"role": "system", "content": "Be brief."}
    without = post(gateway({}, settings(upstream(chats(lambda request: None)).url)), asked, path)
    assert without.status_code == 404 and without.json()["error"]["type"] == "not_found_error"
    native_one = upstream(native(lambda request: request.answer(b'{"input_tokens": 9}')))
    assert post(gateway({}, settings(native_one.url)), asked, path).content == b'{"input_tokens": 9}'
