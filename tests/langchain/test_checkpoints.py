"""LangGraph's SQLite checkpoints as recorded calls."""

from __future__ import annotations

import pickle
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph

from agentspec.errors import ConfigurationError
from agentspec.langchain.checkpoints import read
from agentspec.recordings.calls import BadLineError, RecordedCall
from agentspec.recordings.formats import Format, detect
from agentspec.types import Labels


def build(saver: SqliteSaver) -> Any:
    """plan -> act, which calls a tool; a further turn forgets the first message."""
    graph: Any = StateGraph(MessagesState)
    call = {"name": "look", "args": {"at": "x"}, "id": "c1", "type": "tool_call"}
    graph.add_node("plan", lambda state: {"messages": AIMessage(f"plan for {len(state['messages'])}")})
    graph.add_node(
        "act", lambda state: {"messages": [AIMessage("", tool_calls=[call]), ToolMessage("seen", tool_call_id="c1")]}
    )
    graph.add_node("forget", lambda state: {"messages": RemoveMessage(id=state["messages"][0].id)})
    graph.add_edge(START, "plan").add_edge("plan", "act").add_edge("act", "forget").add_edge("forget", END)
    return graph.compile(checkpointer=saver)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph = build(saver)
        for thread in ("one", "two", "one"):
            graph.invoke({"messages": [HumanMessage(f"hello {thread}")]}, {"configurable": {"thread_id": thread}})
    return path


def said(call: RecordedCall) -> str:
    return str(call.answer["content"] or call.answer["tool_calls"][0]["function"]["name"])


def test_every_answer_once_with_what_it_followed(file: Path) -> None:
    assert detect(file) is Format.checkpoints
    calls = list(read(file))
    assert [(call.labels, said(call)) for call in calls] == [
        (Labels("one", None, "plan"), "plan for 1"),
        (Labels("one", None, "act"), "look"),
        (Labels("two", None, "plan"), "plan for 1"),
        (Labels("two", None, "act"), "look"),
        (Labels("one", None, "plan"), "plan for 4"),
        (Labels("one", None, "act"), "look"),
    ]
    assert calls[0].messages == [{"role": "user", "content": "hello one"}]
    roles = [message["role"] for message in calls[4].messages]
    assert roles == ["assistant", "assistant", "tool", "user"]  # the first message was forgotten
    assert calls[4].messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "x"}'}
    assert all(call.created_at and call.created_at > 1.7e9 for call in calls)


def test_reading_leaves_the_file_alone_while_the_graph_uses_it(file: Path) -> None:
    with SqliteSaver.from_conn_string(str(file)) as saver:
        graph, config = build(saver), {"configurable": {"thread_id": "three"}}
        before = file.read_bytes()
        assert len(list(read(file))) == 6
        assert file.read_bytes() == before
        graph.invoke({"messages": [HumanMessage("more")]}, config)
    assert len(list(read(file))) == 8


def replace_one(file: Path, type_: str, value: bytes) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        [(first,)] = database.execute("SELECT min(checkpoint_id) FROM checkpoints").fetchall()
        database.execute(
            "UPDATE checkpoints SET type = ?, checkpoint = ? WHERE checkpoint_id = ?", (type_, value, first)
        )


class Bomb:
    def __reduce__(self) -> Any:
        return (sys.exit, ("a pickle was loaded",))


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("pickle", pickle.dumps(Bomb())),
        ("json", b'{"lc": 2, "type": "constructor", "id": ["os", "abort"]}'),
        ("msgpack", b"\xc1"),
    ],
)  # fmt: skip
def test_what_is_not_safe_or_not_whole_is_bad(file: Path, type_: str, value: bytes) -> None:
    replace_one(file, type_, value)
    with pytest.raises(BadLineError, match="one/"):
        list(read(file))
    bad: list[BadLineError] = []
    assert len(list(read(file, bad.append))) == 6 and len(bad) == 1


def test_types_that_are_not_listed_are_not_made(file: Path) -> None:
    """A constructor call for `sys.exit` in msgpack, which the permissive serializer would run."""
    import ormsgpack

    inner = ormsgpack.packb(("sys", "exit", ["an unlisted type was made"]))
    state = {
        "v": 4, "id": "x", "ts": "2026-01-01T00:00:00+00:00", "versions_seen": {}, "channel_versions": {},
        "channel_values": {"messages": ormsgpack.Ext(0, inner)},
    }  # fmt: skip
    replace_one(file, "msgpack", ormsgpack.packb(state))
    assert len(list(read(file))) == 6


def test_files_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("SQLite format 3\0 or so" * 100)
    with pytest.raises(ConfigurationError, match="as a SQLite database"):
        list(read(tmp_path / "text"))
    with closing(sqlite3.connect(tmp_path / "other")) as database, database:
        database.execute("CREATE TABLE checkpoints (a)")
    with pytest.raises(ConfigurationError, match="no LangGraph checkpoints"):
        list(read(tmp_path / "other"))


def test_without_the_saver_the_error_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langgraph.checkpoint.sqlite", None)
    with pytest.raises(ConfigurationError, match="pip install langgraph-checkpoint-sqlite"):
        list(read(file))
