"""Turns tokens into text as they arrive, without incomplete characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6  # prompt tokens decoded together with the answer, so that its first token keeps its leading space

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes an answer piece by piece: joined, the pieces are the text that its tokens add after the prompt.

    `decode` turns token ids into text and skips special tokens. Bytes of an incomplete character are held back until
    it is complete, or until `finish`.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._known = decode(self._window) if self._window else ""

    def feed(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        piece = added_text(text, self._known)
        if piece:  # start the next window at this token: the text before it is complete and does not change
            self._window = [token]
            self._known = self._decode(self._window)
        return piece

    def finish(self) -> str:
        """The text that was held back, even if its last character is incomplete."""
        text = self._decode(self._window) if self._window else ""
        piece, self._known = added_text(text, self._known), text
        return piece


def added_text(whole: str, known: str) -> str:
    """The text that `whole` adds to `known`, whose last character may have been incomplete."""
    while known.endswith(REPLACEMENT) and not whole.startswith(known):  # some decoders write one for each of its bytes
        known = known[:-1]
    return whole[len(known) :]
