from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.benchmarks.traces import END, START, read_calls
from agentspec.errors import ConfigurationError

MARKS = {START: 1, END: 2}


def encode(text: str) -> list[int]:
    """Characters, and the two marks as single tokens."""
    out = list[int]()
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), None)
        out.append(MARKS[mark] if mark else 100 + ord(text[0]))
        text = text[len(mark) if mark else 1 :]
    return out


def call(session: str, response: str, *delta: tuple[str, str], **more: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in delta]
    return {"session": session, "messages_delta": messages, "response": response, **more}


def write(path: Path, *records: dict[str, Any]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)
    return path


def test_a_reset_and_a_new_session_start_afresh(tmp_path: Path) -> None:
    records = call("a", "x", ("user", "1")), call("a", "y", ("user", "2"), reset=True), call("b", "z", ("user", "3"))
    prompts = [found.prompt.tolist() for found in read_calls(write(tmp_path / "t.jsonl.gz", *records), encode)]
    assert prompts == [encode(f"<|im_start|>user\n{n}<|im_end|>\n<|im_start|>assistant\n") for n in "123"]


@pytest.mark.parametrize("line", ["{}", "[]", "no json", '{"session":"a","messages_delta":[1],"response":""}'])
def test_a_line_that_is_no_call_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        lines.write(line + "\n")
    with pytest.raises(ConfigurationError, match=r"t\.jsonl\.gz:1: "):
        read_calls(path, encode)
