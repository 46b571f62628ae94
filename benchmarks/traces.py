"""Traces of calls as token arrays, for benchmarks.

A line of a trace is one call: `{"session", "messages_delta": [{"role", "content"}], "response"}`. The delta holds the
messages added since the session's previous call, except that call's answer; `"reset": true` starts from an empty
history. Prompts are rendered as `<|im_start|>role\\ncontent<|im_end|>\\n` and end with `<|im_start|>assistant\\n`; a
response ends with `<|im_end|>`, which the model writes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError
from agentspec.recordings.calls import BadLineError, RecordedCall
from agentspec.recordings.formats import Format, read
from agentspec.recordings.replay import EncodedCall
from agentspec.types import Message

START, END = "<|im_start|>", "<|im_end|>"

Encode = Callable[[str], Sequence[int]]
"""Encodes a text as token ids and adds no special tokens."""


def load_encoder(folder: Path) -> Encode:
    """An encoder from the `tokenizer.json` of a Hugging Face folder. Raises `ConfigurationError` if it is missing."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(f"there is no tokenizer.json in {str(folder)!r}")
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def read_calls(path: Path, encode: Encode, limit: int | None = None) -> list[EncodedCall]:
    """The first `limit` calls of a trace.

    Each distinct message is encoded once. The result equals the encoding of the whole prompt, because the tokenizer
    splits at its special tokens first. Raises `ConfigurationError` for a bad line, and if `<|im_start|>` or
    `<|im_end|>` is not a single token.
    """
    for mark in (START, END):
        if len(encode(mark)) != 1:
            raise ConfigurationError(f"the tokenizer has no special token {mark}; use one with a ChatML template")

    @cache
    def tokens(text: str) -> Tokens:
        return np.asarray(encode(text), dtype=np.int32)

    def encoded(call: RecordedCall) -> EncodedCall:
        rendered = (f"{START}{message['role']}\n{_text(message, call)}{END}\n" for message in call.messages)
        prompt = np.concatenate([tokens(text) for text in (*rendered, f"{START}assistant\n")])
        return EncodedCall(call.labels.session or "", prompt, tokens(_text(call.answer, call) + END))

    return list(map(encoded, islice(read(path, Format.trace), limit)))


def _text(message: Message, call: RecordedCall) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise BadLineError(call.place, "a message is not text")
    return content
