"""Reads what aider keeps beside a project: `.aider.chat.history.md`, or the file given to `--llm-history-file`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from agentspec.recordings.agents.turns import Turn, calls_of, moment
from agentspec.recordings.calls import RecordedCall, lines
from agentspec.types import Labels, Message

CHAT = b"# aider chat started at "
CALL = re.compile(r"(TO LLM|LLM RESPONSE) (\d{4}-\d\d-\d\dT[\d:.]+)$")
_Line = tuple[str, str]


def is_history(line: bytes) -> bool:
    """Whether a file with this first line is one of the two."""
    return line.startswith(CHAT) or CALL.match(line.decode(errors="replace").rstrip()) is not None


def read(path: Path) -> Iterator[RecordedCall]:
    """Every answer, with the chat before it (without the files that aider adds) or with all messages of its request."""
    all_lines = [(place, line.decode(errors="replace").rstrip("\r\n")) for place, line in _every_line(path)]
    first = next((line for _, line in all_lines if line.strip()), "")
    yield from _requests(all_lines) if CALL.match(first) else _chats(path, all_lines)


def _every_line(path: Path) -> Iterator[tuple[str, bytes]]:
    """Blank lines too, which `lines` leaves out."""
    at = 1
    for place, line in lines(path):
        number = int(place.rpartition(":")[2])
        yield from ((f"{path}:{blank}", b"") for blank in range(at, number))
        yield place, line
        at = number + 1


def _chats(path: Path, all_lines: list[_Line]) -> Iterator[RecordedCall]:
    started, turns = "", list[Turn]()
    for role, several in groupby(all_lines, key=lambda line: _role(line[1])):
        block = list(several)
        if role == "start":
            yield from calls_of(turns, Labels(f"{path}:{started}", "aider"))
            started, turns = block[-1][1].removeprefix(CHAT.decode()).strip(), []
        elif role == "user":
            text = "\n".join(line.removeprefix("####").removeprefix(" ").removesuffix("  ") for _, line in block)
            turns.append(Turn({"role": "user", "content": text}, block[0][0]))
        elif role == "assistant" and (text := "\n".join(line for _, line in block).strip()):
            turns.append(Turn({"role": "assistant", "content": text}, block[0][0], _time(started)))
    yield from calls_of(turns, Labels(f"{path}:{started}", "aider"))


def _role(line: str) -> str:
    if line.startswith(CHAT.decode()):
        return "start"
    if line.startswith("####") and not line.startswith("#####"):
        return "user"
    return "program" if line.startswith("> ") or line == ">" else "assistant"


def _time(started: str) -> float | None:
    return moment(started.replace(" ", "T", 1))


def _requests(all_lines: list[_Line]) -> Iterator[RecordedCall]:
    """Blocks of lines below a heading; every line begins with the role of its message, in capitals."""
    messages: list[Message] = []
    for block in _blocks(all_lines):
        place, heading = block[0]
        kind, at = CALL.match(heading).groups()  # type: ignore[union-attr]
        if kind == "TO LLM":
            messages = list(_messages(block[1:]))
        elif answers := list(_messages(block[1:])):
            labels = Labels(place, "aider")
            yield RecordedCall(place, labels, messages, answers[-1], created_at=moment(at))


def _blocks(all_lines: list[_Line]) -> Iterator[list[_Line]]:
    block: list[_Line] = []
    for line in all_lines:
        if CALL.match(line[1]):
            if block:
                yield block
            block = []
        if block or CALL.match(line[1]):
            block.append(line)
    if block:
        yield block


def _messages(block: list[_Line]) -> Iterator[Message]:
    texts: list[str] = []
    role = ""
    for _, line in [*block, ("", "-------")]:
        if line == "-------":
            if texts:
                yield {"role": role.lower(), "content": "\n".join(texts).strip("\n")}
            texts = []
        elif (head := line.partition(" ")[0]) in ("SYSTEM", "USER", "ASSISTANT"):
            role = head
            texts.append(line.removeprefix(head).removeprefix(" "))
