"""Recorded model calls as token arrays, read from gzip-compressed JSON lines.

A line is one call: `{"session", "messages_delta": [{"role", "content"}], "response"}`. The delta holds the messages
added since the session's previous call, that call's own answer excluded; `"reset": true` starts from an empty history.
Prompts are rendered as `<|im_start|>role\ncontent<|im_end|>\n` and end with `<|im_start|>assistant\n`; a response ends
with `<|im_end|>`, which the model writes too.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError

START, END = "<|im_start|>", "<|im_end|>"

Encode = Callable[[str], Sequence[int]]
"""Token ids of a text, nothing added."""


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call: what was asked, and what the model really wrote, its end of turn included."""

    session: str
    prompt: Tokens
    response: Tokens


def load_encoder(folder: Path) -> Encode:
    """The `tokenizer.json` of a Hugging Face folder. Raises `ConfigurationError` where there is none to read."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(f"there is no tokenizer.json in {str(folder)!r}")
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def read_calls(path: Path, encode: Encode, limit: int | None = None) -> list[Call]:
    """The first `limit` calls of a file.

    Messages are encoded one by one, each once however many prompts repeat it. That is the encoding of the whole prompt
    because the tokenizer splits at its special tokens first; raises `ConfigurationError` where `<|im_start|>` and
    `<|im_end|>` are not single tokens, and for a line that is no call.
    """
    for mark in (START, END):
        if len(encode(mark)) != 1:
            raise ConfigurationError(f"the tokenizer has no special token {mark}; use one with a ChatML template")

    @cache
    def tokens(text: str) -> Tokens:
        return np.asarray(encode(text), dtype=np.int32)

    generation = tokens(f"{START}assistant\n")
    calls = []
    for session, history, response in islice(_records(path), limit):
        prompt = np.concatenate([*(tokens(_rendered(role, content)) for role, content in history), generation])
        calls.append(Call(session, prompt, tokens(response + END)))
    return calls


def _rendered(role: str, content: str) -> str:
    return f"{START}{role}\n{content}{END}\n"


def _records(path: Path) -> Iterator[tuple[str, list[tuple[str, str]], str]]:
    """(session, messages of the prompt, response) of each call."""
    session, history = None, list[tuple[str, str]]()
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                added = [(message["role"], message["content"]) for message in record["messages_delta"]]
                answer: str = record["response"]
                fresh = record["session"] != session or record.get("reset", False)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigurationError(f"{path}, line {number}, is not a recorded call: {error!r}") from error
            session = record["session"]
            history = added if fresh else history + added
            yield record["session"], history, answer
            history = [*history, ("assistant", answer)]
