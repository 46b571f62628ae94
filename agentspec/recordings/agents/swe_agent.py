"""Reads the trajectories of SWE-agent (`.traj`) and of mini-SWE-agent (`.traj.json`): one JSON object a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentspec.recordings.agents.response_items import Item, turns_of
from agentspec.recordings.agents.turns import Turn, answer, calls_of, json_file, text_of, tool_call, tool_result
from agentspec.recordings.calls import BadLineError, RecordedCall
from agentspec.types import Labels

SIGNS = ("trajectory", "trajectory_format", "history")


def read(path: Path) -> Iterator[RecordedCall]:
    """Every answer of a run; what a demonstration says is no answer."""
    run, session = json_file(path), path.name.partition(".traj")[0]
    history = run.get("messages") or run.get("history")
    turns = _history(history, path) if isinstance(history, list) else _steps(run.get("trajectory") or [], path)
    try:
        yield from calls_of(list(turns), Labels(session, "swe-agent"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadLineError(str(path), f"not a trajectory ({type(error).__name__}: {error})") from None


def _history(history: list[Any], path: Path) -> Iterator[Turn]:
    for number, message in enumerate(history, start=1):
        place = f"{path}:{number}"
        if "role" not in message:  # a response or an output of the Responses API, as it is
            items = message["output"] if isinstance(message.get("output"), list) else [message]
            yield from turns_of(Item(item, place) for item in items)
        elif message["role"] == "assistant":
            calls = [_call(call) for call in message.get("tool_calls") or []]
            thoughts = str(message.get("reasoning_content") or "")
            said = not message.get("is_demo")
            yield Turn(answer(text_of(message.get("content")), thoughts, calls), place, said=said)
        elif message["role"] == "tool":
            id = message.get("tool_call_id") or next(iter(message.get("tool_call_ids") or []), "")
            yield Turn(tool_result(id, text_of(message.get("content"))), place)
        else:
            role = message["role"] if message["role"] in ("system", "user") else "user"
            yield Turn({"role": role, "content": text_of(message.get("content"))}, place)


def _call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return tool_call(call.get("id"), function["name"], function.get("arguments"))


def _steps(steps: list[Any], path: Path) -> Iterator[Turn]:
    for number, step in enumerate(steps, start=1):
        yield Turn(answer(text_of(step.get("response"))), f"{path}:{number}")
        yield Turn({"role": "user", "content": text_of(step.get("observation"))}, f"{path}:{number}")
