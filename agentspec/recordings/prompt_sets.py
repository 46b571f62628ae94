"""Loads the prompts that ship with the benchmarks: code edits, and open questions that do not repeat."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Literal

PromptSet = Literal["edit", "edit_short", "edit_warm", "control"]


def load_prompts(name: PromptSet) -> list[str]:
    """The user messages of one set, in file order. `prompts/README.md` describes the format."""
    return [_message(record) for record in _records(name)]


def load_codes(name: Literal["edit", "edit_short", "edit_warm"]) -> list[str]:
    """The distinct pieces of code that the tasks of one set are about, in file order."""
    return list(dict.fromkeys(record["code"] for record in _records(name)))


def _records(name: PromptSet) -> list[dict[str, str]]:
    text = files("agentspec.recordings").joinpath("prompts", f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line]


def _message(record: dict[str, str]) -> str:
    if "code" not in record:
        return record["instruction"]
    return f"{record['instruction']}\n\n```python\n{record['code']}\n```"
