"""Tools that come with the conversation, as Codex sends them: added by items, deferred, searched for and loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import CacheSettings, ModelSettings, Settings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))

EXEC = {"type": "function", "name": "exec_command", "description": "Runs it.", "strict": False,
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}}  # fmt: skip
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.",
         "format": {"type": "grammar", "syntax": "lark",
                    "definition": 'start: "*** Begin" /[^*]+/ "*** End"'}}  # fmt: skip
SEARCH = {"type": "tool_search", "execution": "client", "description": "Searches over deferred tools.",
          "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "number"}},
                         "required": ["query"], "additionalProperties": False}}  # fmt: skip
CREATE = {"type": "function", "name": "create_event", "description": "Creates.", "strict": False,
          "defer_loading": True, "parameters": {"type": "object", "properties": {}}}  # fmt: skip
CALENDAR = {"type": "namespace", "name": "mcp__calendar", "description": "Plan events.", "tools": [CREATE]}
FUNCTIONS = {"type": "namespace", "name": "functions", "description": "Tools in the functions namespace.",
             "tools": [EXEC, PATCH]}  # fmt: skip
ADDED = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [FUNCTIONS, SEARCH]}
ASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "plan it"}]}
QUERY = {"query": "calendar create", "limit": 1}


def calls(*functions: tuple[str, Any]) -> Answer:
    made = [
        {"index": at, "id": f"call_{at}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(functions)
    ]
    return Answer("", extra={"tool_calls": made}, finish_reason="tool_calls")


def script(request: GenerateRequest) -> Answer:
    return called(request.tools, request.messages or ())


def called(tools: Sequence[Any], messages: Sequence[Any]) -> Answer:
    """Searches for tools first, then calls all that it is shown besides the search."""
    names = [tool["function"]["name"] for tool in tools]
    if not any(message["role"] == "tool" for message in messages) and "tool_search" in names:
        return calls(("tool_search", QUERY))
    return calls(*((name, {"input": "*** Begin x*** End"}) for name in names if name != "tool_search"))


class Holding(FakeBackend):
    """As a local model, whose calls are drawn by a grammar."""

    def holds_calls(self, request: GenerateRequest) -> bool:
        return True


class Chats:
    """An upstream that answers chats only, with what `script` would."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: Any) -> None:
        if not request.target.startswith("/v1/chat/"):
            request.answer(b"{}", 404)
            return
        self.bodies.append(request.json)
        made = called(request.json.get("tools", ()), request.json["messages"]).extra["tool_calls"]
        message = {"role": "assistant", "content": None, "tool_calls": made}
        if request.json.get("stream"):
            request.head()
            for finish, delta in ((None, message), ("tool_calls", {})):
                chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
                request.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            request.send(b"data: [DONE]\n\n")
            return
        request.answer(json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode())


@pytest.fixture(params=["local", "translated"])
def served(request: Any, gateway: Any, upstream: Any, tmp_path: Path) -> Any:
    """A gateway with the model `m`, and a function that tells the last chat's functions and messages."""
    if request.param == "local":
        backend = Holding(script)
        settings = Settings(backends={}, cache=CacheSettings(path=tmp_path))
        running = gateway({"m": backend}, settings)
        return running, lambda: (
            [tool["function"] for tool in backend.requests[-1].tools], list(backend.requests[-1].messages or ())
        )  # fmt: skip
    chats = Chats()
    backends: dict[str, Any] = {"up": OpenAISettings(base_url=upstream(chats).url)}
    settings = Settings(models={"m": ModelSettings(backend="up")}, backends=backends,
                        cache=CacheSettings(path=tmp_path))  # fmt: skip
    running = gateway({}, settings)
    return running, lambda: (
        [tool["function"] for tool in chats.bodies[-1].get("tools", ())], chats.bodies[-1]["messages"]
    )  # fmt: skip


def turn(running: Any, items: list[Any], *, stream: bool = True, **fields: Any) -> list[dict[str, Any]]:
    """The finished items of an answer, all its events checked."""
    body = {"model": "m", "input": items, "stream": stream, "tool_choice": "auto", **fields}
    answer = HTTP.post(f"{running.url}/v1/responses", json=body, headers={"authorization": "Bearer key"})
    assert answer.status_code == 200, answer.text
    if not stream:
        output: list[dict[str, Any]] = answer.json()["output"]
        return output
    events = [json.loads(block.split("data: ")[1]) for block in answer.text.strip().split("\n\n")]
    for event in events:
        EVENT.validate_python(event)
    assert events[-1]["type"] == "response.completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    return done


def found(call: dict[str, Any], *tools: Any) -> dict[str, Any]:
    return {"type": "tool_search_output", "call_id": call["call_id"], "status": "completed", "execution": "client",
            "tools": [*tools]}  # fmt: skip


def named(items: list[dict[str, Any]]) -> list[tuple[str, Any, Any]]:
    return [(item["type"], item.get("namespace"), item.get("name")) for item in items]


LITE = [
    ("custom_tool_call", "functions", "apply_patch"),
    ("function_call", "functions", "exec_command"),
    ("function_call", "mcp__calendar", "create_event"),
]


@pytest.mark.parametrize("stream", [True, False])
def test_tools_come_by_items_and_by_search(served: Any, stream: bool) -> None:
    """As Codex sends them to models of its Responses Lite: no `tools`, an item first, what was found later."""
    running, last = served
    options = {"stream": stream, "store": False, "parallel_tool_calls": False}
    [call] = turn(running, [ADDED, ASK], **options)
    assert call.items() >= {"type": "tool_search_call", "execution": "client", "arguments": QUERY}.items()
    assert [one["name"] for one in last()[0]] == ["exec_command", "apply_patch", "tool_search"]

    sent_back = {key: value for key, value in call.items() if key not in ("id", "status")}
    history = [ADDED, ASK, sent_back, found(call, CALENDAR)]
    done = turn(running, history, **options)
    assert sorted(named(done)) == LITE and [one["name"] for one in last()[0]][3] == "mcp__calendar__create_event"
    functions, messages = last()
    assert functions[2]["description"] == SEARCH["description"] and functions[2]["parameters"] == SEARCH["parameters"]
    asked, answered = messages[-2:]
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == QUERY
    assert answered["role"] == "tool" and "mcp__calendar__create_event" in answered["content"]

    results = [
        {"type": one["type"] + "_output", "call_id": one["call_id"], "output": str(at)} for at, one in enumerate(done)
    ]
    fixed = [{**item, "call_id": f"{item['call_id']}b"} for item in (*done, *results)]  # the script's ids repeat
    turn(running, [*history, *fixed], **options)
    past = [one["function"]["name"] for message in last()[1] for one in message.get("tool_calls", ())]
    assert past == ["tool_search", "exec_command", "apply_patch", "mcp__calendar__create_event"]


def test_a_deferred_tool_is_not_offered_until_it_is_loaded(served: Any) -> None:
    running, last = served
    look = {"type": "function", "name": "look", "description": "Looks.", "defer_loading": True}
    tools = [SEARCH, EXEC, CALENDAR, look]
    [call] = turn(running, [ASK], tools=tools)
    functions, _ = last()
    assert [one["name"] for one in functions] == ["tool_search", "exec_command"]
    listed = "Searches over deferred tools.\n\nIt can find:\n- mcp__calendar: Plan events.\n- look: Looks."
    assert functions[0]["description"] == listed
    done = turn(running, [ASK, call, found(call, look)], tools=tools)
    assert named(done) == [("function_call", None, "exec_command"), ("function_call", None, "look")]
    assert "- look" not in next(one for one in last()[0] if one["name"] == "tool_search")["description"]
    turn(running, [ASK, call, found(call)], tools=tools)
    assert last()[1][-1]["content"] == "No tool was found." and len(last()[0]) == 2


def test_tools_of_earlier_responses_stay(served: Any) -> None:
    """With `previous_response_id`, and as the store lists what was sent."""
    running, _ = served
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="key", max_retries=0) as client:
        items: Any = [ADDED, ASK]
        first = client.responses.create(model="m", input=items)
        [call] = first.output
        assert call.type == "tool_search_call" and call.arguments == QUERY
        more: Any = [found({"call_id": call.call_id}, CALENDAR)]
        choice: Any = {"type": "function", "name": "create_event", "namespace": "mcp__calendar"}
        second = client.responses.create(model="m", previous_response_id=first.id, input=more, tool_choice=choice)
        assert sorted(named([one.to_dict() for one in second.output])) == LITE
        listed = [one.to_dict() for one in client.responses.input_items.list(first.id, order="asc").data]
    assert [ITEM.validate_python(item).type for item in listed] == ["additional_tools", "message"]
    assert listed[0]["tools"] == ADDED["tools"]


def test_a_tool_whose_name_another_has_by_its_namespace(served: Any) -> None:
    running, last = served
    plain = {**EXEC, "name": "disk__read"}
    space = {"type": "namespace", "name": "disk", "description": "", "tools": [{**EXEC, "name": "read"}]}
    long = {"type": "namespace", "name": "ü" * 70, "description": "", "tools": [{**EXEC, "name": "read"}]}
    done = turn(running, [ASK], tools=[space, long, plain])
    assert named(done) == [
        ("function_call", "disk", "read"), ("function_call", "ü" * 70, "read"), ("function_call", None, "disk__read"),
    ]  # fmt: skip
    names = [one["name"] for one in last()[0]]
    assert names[2] == "disk__read" and len({*names}) == 3 and max(map(len, names)) <= 64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "tool_search"}]}, "tools[0].execution"),
        ({"tools": [CALENDAR]}, "tools[0].tools[0].defer_loading"),
        ({"tools": [EXEC, EXEC]}, "tools[1].name"),
        ({"tools": [SEARCH, CALENDAR], "tool_choice": {"type": "function", "name": "create_event"}}, "tool_choice"),
        ({"input": [{**ADDED, "tools": [{"type": "web_search"}]}, ASK]}, "input[0].tools[0].type"),
        ({"input": [{**ADDED, "role": "user"}, ASK]}, "input[0].role"),
        ({"input": [ASK, {"type": "tool_search_call", "arguments": {}, "execution": "server"}]}, "input[1].call_id"),
        ({"input": [ASK, {"type": "tool_search_call", "call_id": "c", "arguments": {}}]}, "input[1].execution"),
        ({"input": [ASK, {"type": "agent_message", "content": []}]}, "input[1].type"),
    ],
)
def test_what_is_refused_is_named(served: Any, fields: dict[str, Any], param: str) -> None:
    running, _ = served
    answer = HTTP.post(f"{running.url}/v1/responses", json={"model": "m", "input": [ASK], **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
