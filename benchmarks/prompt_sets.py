"""The prompts that ship with the benchmarks: code edits, and open questions that do not repeat."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Literal

PromptSet = Literal["edit", "edit_short", "edit_warm", "control"]


def load_prompts(name: PromptSet) -> list[str]:
    """The user messages of one set, in file order. Their format is described in `prompts/README.md`."""
    text = files("agentspec.benchmarks").joinpath("prompts", f"{name}.jsonl").read_text(encoding="utf-8")
    return [_message(json.loads(line)) for line in text.splitlines() if line]


def _message(record: dict[str, str]) -> str:
    if "code" not in record:
        return record["instruction"]
    return f"{record['instruction']}\n\n```python\n{record['code']}\n```"
