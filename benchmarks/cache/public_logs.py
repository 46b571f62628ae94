"""Converts published agent logs to traces for the cache benchmark: one record for each model call.

docs/testing.md names the repositories, their commits and licences.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError

Record = dict[str, Any]


class LogSource(StrEnum):
    tau_bench = "tau-bench"
    tau2_bench = "tau2-bench"
    mini_swe_agent = "mini-swe-agent"
    intercode = "intercode"
    aider = "aider"


def convert(source: LogSource, files: Sequence[Path], out: Path) -> int:
    """Write the model calls that `files` record to `out`, gzip-compressed JSON lines; returns how many.

    Raises `ConfigurationError` for a file that is no log of that source, and then leaves `out` unchanged.
    """
    from agentspec.benchmarks.report import names_of  # with numpy, which the help of a command does without

    partial = out.with_name(out.name + ".partial")
    count = 0
    try:
        with gzip.open(partial, "wt", encoding="utf-8") as lines:
            for file, name in zip(files, names_of(files), strict=True):
                for record in _read(source, file, str(Path(name).with_suffix(""))):
                    lines.write(json.dumps(record, ensure_ascii=False) + "\n")
                    count += 1
        if not count:
            raise ConfigurationError(f"no model call of {source} in {', '.join(map(str, files))}")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _read(source: LogSource, file: Path, name: str) -> Iterator[Record]:
    try:
        yield from _READERS[source](file, name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{file} is not a log of {source}: {error!r}") from error


def _tau_bench(file: Path, name: str) -> Iterator[Record]:
    for run in json.loads(file.read_text("utf-8")):
        yield from calls(f"{name}-{run['task_id']}-trial{run.get('trial', 0)}", run["traj"])


def _tau2_bench(file: Path, name: str) -> Iterator[Record]:
    """The agent's view, without the simulated user's tool calls. The recorded policy is the system prompt."""
    log = json.loads(file.read_text("utf-8"))
    policy = {"role": "system", "content": log["info"]["environment_info"]["policy"]}
    for run in log["simulations"]:
        seen = [message for message in run["messages"] if _in_agents_view(message)]
        yield from calls(f"{name}-{run['task_id']}-trial{run.get('trial', 0)}", [policy, *seen])


def _in_agents_view(message: Mapping[str, Any]) -> bool:
    if message["role"] == "tool":
        return bool(message.get("requestor", "assistant") == "assistant")
    return message["role"] == "assistant" or bool(message.get("content"))


def _mini_swe_agent(file: Path, _: str) -> Iterator[Record]:
    """A run of mini-swe-agent 1 or 2; the folder tells two runs of an instance apart."""
    instance = file.name.removesuffix(".json").removesuffix(".traj")
    yield from calls(f"{instance}@{file.parent.parent.name}", json.loads(file.read_text("utf-8"))["messages"])


def _intercode(file: Path, name: str) -> Iterator[Record]:
    """The question, the commands and the database's answers; the log does not contain the game's instructions."""
    for number, game in json.loads(file.read_text("utf-8")).items():
        turns, messages = game["turn_history"], [{"role": "user", "content": game["query"]}]
        for action, seen in zip(turns["actions"], turns["observations"], strict=True):
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": str(seen)}]
        yield from calls(f"{name}-{number}", messages)


def _aider(file: Path, name: str) -> Iterator[Record]:
    """A chat history in Markdown: aider writes quotes, the user level-four headings, and the model everything else."""
    for started, chat in _chats(file.read_text("utf-8")):
        messages: list[Record] = []
        asked, answered = list[str](), list[str]()
        for line in chat:
            if re.match(r"> Tokens: .* received", line):
                if asked and "".join(answered).strip():
                    messages += [_message("user", asked), _message("assistant", answered)]
                asked, answered = [], []
            elif line.startswith(("#### ", "> ")):
                asked.append(line.split(" ", 1)[1])
            else:
                answered.append(line)
        yield from calls(f"{name}-{started}", messages)


def _chats(text: str) -> Iterator[tuple[str, list[str]]]:
    """(time, lines) of each chat."""
    pieces = re.split(r"^# aider chat started at (.+)$", text, flags=re.MULTILINE)
    for started, chat in zip(pieces[1::2], pieces[2::2], strict=True):
        yield started.strip(), chat.splitlines()


def _message(role: str, lines: Sequence[str]) -> Record:
    return {"role": role, "content": "\n".join(line.rstrip() for line in lines).strip()}


_READERS: dict[LogSource, Callable[[Path, str], Iterator[Record]]] = {
    LogSource.tau_bench: _tau_bench,
    LogSource.tau2_bench: _tau2_bench,
    LogSource.mini_swe_agent: _mini_swe_agent,
    LogSource.intercode: _intercode,
    LogSource.aider: _aider,
}


def calls(session: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
    """A record for each assistant message that answers a user: the new messages before it, and its text.

    A greeting before the user's first message is not the model's output; it counts as prompt.
    """
    added: list[Record] = []
    step, asked = 0, False
    for message in messages:
        role, content = message["role"], _content(message)
        if role == "assistant" and asked:
            yield {"session": session, "step": step, "messages_delta": added, "response": content}
            step, added = step + 1, []
        elif role in ("system", "user", "assistant", "tool"):
            added.append({"role": role, "content": content})
            asked = asked or role == "user"


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message, followed by one line of JSON for each tool call."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return "\n".join([*([content] if content else []), *map(_tool_call, message.get("tool_calls") or [])])


def _tool_call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
