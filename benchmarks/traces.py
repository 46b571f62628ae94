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
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.protocol.validation import NOT_TEXT, is_text
from agentspec.recordings.calls import BadLineError, RecordedCall
from agentspec.recordings.formats import Format, read
from agentspec.recordings.replay import EncodedCall
from agentspec.types import Message

START, END = "<|im_start|>", "<|im_end|>"

Encode = Callable[[str], Sequence[int]]
"""Encodes a text as token ids and adds no special tokens."""


def load_encoder(folder: Path) -> Encode:
    """An encoder from the `tokenizer.json` of a Hugging Face folder. Raises `ConfigurationError` if it is missing.

    The encoder raises `InvalidRequestError` for half a surrogate pair.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(f"there is no tokenizer.json in {str(folder)!r}")
    tokenizer = Tokenizer.from_file(str(file))

    def encode(text: str) -> Sequence[int]:
        if not is_text(text):
            raise InvalidRequestError(f"the text{NOT_TEXT}")
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


def read_calls(path: Path, encode: Encode, limit: int | None = None) -> list[EncodedCall]:
    """The first `limit` calls of a trace. Raises `ConfigurationError` for a bad line, and what `chatml` raises."""
    return list(map(chatml(encode), islice(read(path, Format.trace), limit)))


def chatml(encode: Encode) -> Callable[[RecordedCall], EncodedCall]:
    """A function that turns recorded calls into token arrays, for models with a ChatML template.

    It encodes each distinct message once. The result equals the encoding of the whole prompt, because the tokenizer
    splits at its special tokens first. Raises `ConfigurationError` if `<|im_start|>` or `<|im_end|>` is not a single
    token, and for messages that are not text.
    """
    for mark in (START, END):
        if len(encode(mark)) != 1:
            raise ConfigurationError(f"the tokenizer has no special token {mark}; use one with a ChatML template")

    @cache
    def tokens(text: str) -> Tokens:
        return np.asarray(encode(text), dtype=np.int32)

    generation = tokens(f"{START}assistant\n")

    def call(recorded: RecordedCall) -> EncodedCall:
        if recorded.prompt is not None:
            prompt = tokens(recorded.prompt)
        else:
            rendered = (_rendered(message, recorded) for message in recorded.messages)
            prompt = np.concatenate([*(tokens(text) for text in rendered), generation])
        end = END if recorded.finished else ""
        answer = tokens(_text(recorded.answer, recorded) + end)
        if not len(answer):
            raise BadLineError(recorded.place, "the answer holds no tokens")
        return EncodedCall(recorded.labels.session or "", prompt, answer)

    return call


def _rendered(message: Message, recorded: RecordedCall) -> str:
    return f"{START}{message['role']}\n{_text(message, recorded)}{END}\n"


def _text(message: Message, recorded: RecordedCall) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise BadLineError(
            recorded.place, "a message is not text; replay with --model reads it by the model's template"
        )
    return content
