"""A stand-in for an engine process: it answers with its script, or each prompt with its numbers, and notes its turns.

`FAKE` in the environment is JSON: {drafter: what it does wrong}, with "fails", "ends", "lies" or "talks".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

OPTIONS = json.loads(sys.argv[1])


METHOD = (OPTIONS["speculative_config"] or {}).get("method", "none")
OFF = os.environ.get("AGENTSPEC_VLLM") == "off"
NAME = {"none": "off", "ngram_gpu": "ngram_gpu", "suffix": "Arctic" if OFF else "agentspec"}[METHOD]
WRONG = json.loads(os.environ.get("FAKE", "{}")).get(NAME, "")


def note(text: str) -> None:
    with Path(os.environ["FAKE_TURNS"]).open("a") as turns:
        turns.write(f"{NAME}: {text}\n")


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    global script
    if asked["op"] == "call":
        if asked["name"] == "bench_script":
            (script,) = asked["arguments"]
        else:
            note(asked["name"])
        return {"value": True}
    note(f"{len(asked['prompts'])} prompts {asked['session']}".strip())
    if WRONG == "ends":
        sys.exit("out of memory")
    count = asked["max_tokens"]
    tokens = [spoken(prompt, count) for prompt in asked["prompts"]]
    if WRONG == "lies":
        tokens[-1][-1] += 1
    width = 1 if NAME == "off" else 4
    read = sum(map(len, asked["prompts"]))
    return {
        "seconds": count / width + 1.0,
        "tokens": tokens,
        "cached": [0] * len(tokens),
        "decode": [count / width] * len(tokens),
        "steps": [read, *([width] * (count // width))],
    }


def spoken(prompt: list[int], count: int) -> list[int]:
    if script[: len(prompt)] == prompt:
        return script[len(prompt) :][:count]
    return [(sum(prompt) + place) % 512 for place in range(count)]


script: list[int] = []
print("[/x] a line of the log", file=sys.stderr, flush=True)
if WRONG == "fails":
    print(json.dumps({"failed": "RuntimeError('no such method')"}), flush=True)
    sys.exit(1)
if WRONG == "talks":
    print("hello", flush=True)
else:
    print(json.dumps({"ready": 0.1, "info": {"device": "a stand-in", "drafter": NAME}}), flush=True)
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
