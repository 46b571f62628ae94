"""Names of tools in a chat: apart from each other, as upstreams take them, and each found again by its own."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.request import ResponsesRequest, parse_responses
from agentspec.protocol.tools import ToolNames, key_of
from agentspec.types import Delta

VALID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Names that meet: separators inside and at the ends, the hash's form, unicode, beyond every limit.
parts = st.sampled_from(
    ["a", "b", "_", "__", "a__b", "é", "\U0001f642", ".", "tool_search", "functions", "x" * 70, " "]
)
names = st.one_of(
    st.lists(parts, min_size=1, max_size=4).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=90),
    st.sampled_from(["none", "auto", "required", "a__b", "a", "b"]),
)
tools = st.tuples(st.none() | names, names, st.sampled_from(["function", "custom"]))


def requested(each: list[tuple[str | None, str, str]], items: list[dict[str, Any]]) -> ResponsesRequest:
    """A request with one tool of each name."""
    declared: list[dict[str, Any]] = []
    for namespace, name, kind in {key_of(name, space): (space, name, kind) for space, name, kind in each}.values():
        tool = {"type": kind, "name": name}
        declared.append(tool if namespace is None else {"type": "namespace", "name": namespace, "tools": [tool]})
    body = {"tools": declared, "input": [{"role": "user", "content": "x"}, *items]}
    return parse_responses(body)


@given(st.lists(tools, max_size=9), st.lists(tools, max_size=5))
@example([(None, "a__b", "function"), ("a", "b", "function"), ("a__", "b", "custom")], [("a", "_b", "function")])
def test_every_tool_has_its_own_name_and_is_found_by_it(
    each: list[tuple[str | None, str, str]], called: list[tuple[str | None, str, str]]
) -> None:
    """Also those that the conversation called and that are not offered."""
    items = [
        {"type": "function_call", "call_id": f"c{at}", "name": name, "namespace": space, "arguments": "{}"}
        for at, (space, name, _) in enumerate(called)
    ]
    request = requested(each, items)
    offered = [tool["function"]["name"] for tool in request.chat.get("tools", ())]
    assert len(set(offered)) == len(offered) == len(request.tools) and all(map(VALID.fullmatch, offered))
    assert not {"none", "auto", "required"} & {*offered}

    messages = request.messages()
    past = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    keys = [key_of(name, space) for space, name, _ in called]
    assert [request.names.key(name) for name in past] == keys and all(map(VALID.fullmatch, past))
    assert {request.names.of_key(key) for key in keys} == {*past}

    for streamed in (True, False):
        calls = [{"index": at, "id": f"c{at}", "function": {"name": name, "arguments": '{"input": "x"}'}}
                 for at, name in enumerate(offered)]  # fmt: skip
        whole = Delta(finish_reason="tool_calls", extra={"tool_calls": calls})
        deltas = [Delta(extra={"tool_calls": [call]}) for call in calls] if streamed else [whole]
        writer = EventWriter(request)
        events = [event for delta in deltas for event in writer.chunks(delta)] + [*writer.close()]
        done = [one["item"] for one in events if one["type"] == "response.output_item.done" and calls]
        found = [(one["type"].split("_")[0], one.get("namespace"), one["name"]) for one in done]
        assert found == [(tool.kind, tool.namespace, tool.name) for tool in request.tools]


@given(st.lists(st.tuples(st.none() | names, names), max_size=6))
def test_a_name_does_not_depend_on_the_others_where_nothing_meets(each: list[tuple[str | None, str]]) -> None:
    keys = {key_of(name, space) for space, name in each}
    table = ToolNames.of(keys)
    alone = {key: ToolNames.of([key]).of_key(key) for key in keys}
    for key in keys:
        if [*alone.values()].count(alone[key]) == 1 and alone[key] not in {name for _, name in keys}:
            assert table.of_key(key) == alone[key]
