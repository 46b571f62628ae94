"""A model's text side: chat templates, encoding and decoding."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from agentspec.backends.base import NONE
from agentspec.backends.torch.text.chat_template import render
from agentspec.errors import ContextLengthError, InvalidRequestError
from agentspec.protocol.validation import NOT_TEXT, is_text
from agentspec.text import Decode
from agentspec.types import GenerateRequest, Message

LONG_TEXT = 4096  # characters


class TokenizerAdapter:
    """Encodes and decodes with a tokenizer; decoding skips special tokens. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # settings in the tokenizer's file would cut prompts silently
            self._fast.no_truncation()
            self._fast.no_padding()
        self.special_ids = _special_ids(tokenizer)
        self._longest = 0 if self._fast is None else _longest_token(self._fast)

    def prompt(self, request: GenerateRequest) -> list[int]:
        """The prompt's token ids. Raises `InvalidRequestError` for messages that the chat template refuses."""
        return self.read(request)[1]

    def read(self, request: GenerateRequest, limit: int | None = None) -> tuple[str, list[int]]:
        """The prompt as text (empty if it was given as token ids) and its token ids.

        Raises `InvalidRequestError`, and `ContextLengthError` for a text that certainly has more than `limit` tokens.
        """
        if request.token_ids is not None:
            return "", [int(token) for token in request.token_ids]
        if request.text is not None:
            self._check_length(request.text, limit, "prompt")
            return request.text, self.encode(request.text, special=True)
        start = request.start_answer and not request.continue_final
        text = render(self.tokenizer, request, start=start, continue_final=request.continue_final)
        self._check_length(text, limit, "messages")
        return text, self.encode(text)

    def _check_length(self, text: str, limit: int | None, param: str) -> None:
        if limit is not None and (fewest := self.fewest_tokens(text)) > limit:
            raise ContextLengthError(f"prompt is too long: at least {fewest} tokens > {limit} maximum", param=param)

    def render(
        self,
        messages: Sequence[Message],
        *,
        start: bool = True,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """Render messages by the model's own chat template, in transformers' sandbox: `start` opens an answer,
        `continue_final` leaves the last message open. Raises `InvalidRequestError` for messages that the template
        refuses.
        """
        request = GenerateRequest("", messages, tools=tuple(tools), template_arguments=template_arguments)
        return render(self.tokenizer, request, start=start, continue_final=continue_final)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`; `special` adds the special tokens that the model wants around a prompt.

        Raises `InvalidRequestError` for a lone surrogate.
        """
        if not is_text(text):
            raise InvalidRequestError(f"the text{NOT_TEXT}")
        if self._fast is None:
            with self._lock:
                return list(self.tokenizer.encode(text, add_special_tokens=special))
        if len(text) > LONG_TEXT:  # a batch lets other threads run at the same time
            return list(self._fast.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without tokenizing it; 0 if nothing is known."""
        return len(text) // self._longest if self._longest else 0

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `token_ids`, without special tokens unless `special`."""
        if self._fast is not None:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=not special))
        with self._lock:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    def decoder(self, shown: frozenset[int]) -> Decode:
        """A function like `decode` that writes out the special tokens in `shown`."""
        if not shown:
            return self.decode

        def decode(token_ids: Sequence[int]) -> str:
            runs = groupby(token_ids, key=shown.__contains__)
            return "".join("".join(map(self.spell, run)) if marked else self.decode(list(run)) for marked, run in runs)

        return decode

    def spell(self, token_id: int) -> str:
        return self.decode([token_id], special=True)


def _longest_token(tokenizer: Any) -> int:
    """The most characters that one token can stand for; 0 if that is not known.

    Tokens of byte-level BPE spell the text byte by byte, unless a normalizer shortens it or a token means any text.
    """
    model, kind = tokenizer.model, type(tokenizer.decoder).__name__
    if kind != "ByteLevel" or tokenizer.normalizer is not None or getattr(model, "unk_token", "") is not None:
        return 0
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # such a token takes any number of blanks
        return 0
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of special tokens, which stand for no text: ends, roles and other marks."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marks = (token for token, added_token in added.items() if getattr(added_token, "special", False))
    return frozenset([*getattr(tokenizer, "all_special_ids", ()), *marks])
