"""Reads model calls from LangGraph's checkpoints: every answer in a graph's state, with the messages before it.

LangGraph's own saver reads the checkpoints from a snapshot of the database, so the graph may keep running. The
serializer is restricted to msgpack and to the types that LangGraph lists as safe: no pickle, no constructors named by
the file.
"""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, BaseMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.langchain.messages import to_openai
from agentspec.recordings.calls import BadLineError, OnBad, RecordedCall, refuse
from agentspec.types import Labels

if TYPE_CHECKING:
    from langgraph.checkpoint.base import CheckpointTuple
    from langgraph.checkpoint.sqlite import SqliteSaver


_OLDEST_FIRST = "SELECT thread_id, checkpoint_ns, checkpoint_id FROM checkpoints ORDER BY checkpoint_id"


class MessagesOnly(JsonPlusSerializer):
    """LangGraph's serializer, restricted to types that are known to be safe."""

    def __init__(self) -> None:
        super().__init__(pickle_fallback=False, allowed_json_modules=None, allowed_msgpack_modules=None)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Deserialize `data`. Raises `ValueError` for any format except msgpack and bytes."""
        if data[0] not in ("msgpack", "null", "bytes"):
            raise ValueError(f"stored as {data[0]!r}, which is not read; only msgpack is")
        return super().loads_typed(data)


def read(path: Path, on_bad: OnBad = refuse) -> Iterator[RecordedCall]:
    """The model calls of a SQLite file of checkpoints, oldest first, each once.

    The session is the thread id; the step is the node that ran, if only one did. Raises `ConfigurationError` for a file
    without checkpoints, and if langgraph-checkpoint-sqlite is not installed.
    """
    with _saver(path) as saver:
        seen: dict[str, set[bytes]] = defaultdict(set)
        graphs: dict[tuple[str, str], _Graph] = {}
        for thread, namespace, checkpoint in saver.conn.execute(_OLDEST_FIRST).fetchall():
            place = f"{path}:{thread}/{checkpoint}"
            graph = graphs.setdefault((thread, namespace), _Graph(thread, seen[thread]))
            where = {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": checkpoint}
            try:
                found = saver.get_tuple({"configurable": where})
                yield from graph.calls(found, place) if found else ()
            except (ValueError, TypeError, KeyError, InvalidRequestError) as error:
                on_bad(BadLineError(place, f"cannot be read: {error}"))


class _Graph:
    """Follows one graph or subgraph of a thread; all graphs of a thread share `seen`, the digests of its messages."""

    def __init__(self, session: str, seen: set[bytes]) -> None:
        self._session = session
        self._seen = seen
        self._versions: Mapping[str, Any] = {}

    def calls(self, found: CheckpointTuple, place: str) -> list[RecordedCall]:
        """The calls whose answers appear in this checkpoint for the first time."""
        state, step = found.checkpoint, self._step(found.checkpoint.get("versions_seen") or {})
        created_at = datetime.fromisoformat(state["ts"]).timestamp()
        calls = []
        for channel in state["channel_values"].values():
            messages = _messages(channel)
            for number, message in enumerate(messages):
                if isinstance(message, AIMessage) and self._is_new(messages[: number + 1]):
                    asked, [answer] = to_openai(messages[:number]), to_openai([message])
                    labels = Labels(self._session, None, step)
                    calls.append(RecordedCall(place, labels, asked, answer, created_at=created_at))
        return calls

    def _is_new(self, messages: list[BaseMessage]) -> bool:
        last = messages[-1]
        text = last.id or repr([(message.type, message.content) for message in messages])
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        new = digest not in self._seen
        self._seen.add(digest)
        return new

    def _step(self, versions: Mapping[str, Any]) -> str | None:
        """The node that ran before this checkpoint, found by the versions that nodes had seen; None for several."""
        ran = [node for node, seen in versions.items() if seen != self._versions.get(node) and node[:2] != "__"]
        self._versions = versions
        return ran[0] if len(ran) == 1 else None


def _messages(channel: Any) -> list[BaseMessage]:
    """The messages of a channel that holds only messages; empty for other channels."""
    if isinstance(channel, list) and all(isinstance(item, BaseMessage) for item in channel):
        return channel
    return [channel] if isinstance(channel, BaseMessage) else []


@contextmanager
def _saver(path: Path) -> Iterator[SqliteSaver]:
    """LangGraph's saver on a copy of the current database, which it may change."""
    try:
        from langgraph.checkpoint.sqlite import SqliteSaver
    except ModuleNotFoundError as error:
        advice = "pip install langgraph-checkpoint-sqlite"
        raise ConfigurationError(f"reading {path} needs LangGraph's saver for SQLite: {advice}") from error
    with (
        tempfile.TemporaryDirectory(prefix="agentspec-") as folder,
        closing(sqlite3.connect(Path(folder) / "checkpoints.sqlite", check_same_thread=False)) as copy,
    ):
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as original:
                original.backup(copy)
            known = {name for (name,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        except sqlite3.DatabaseError as error:
            raise ConfigurationError(f"{path}: cannot be read as a SQLite database: {error}") from None
        if not {"checkpoints", "writes"} <= known:
            raise ConfigurationError(f"{path}: holds no LangGraph checkpoints")
        yield SqliteSaver(copy, serde=MessagesOnly())
