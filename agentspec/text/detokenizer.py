"""From tokens to text as they arrive: no half characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6  # prompt tokens decoded along, so that the answer's first token keeps its leading space

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes an answer piece by piece: joined, the pieces are the text its tokens add behind the prompt.

    `decode` turns token ids into text and skips special tokens. Bytes that do not form a character yet are held back
    until they do, or until `finish`.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._known = decode(self._window) if self._window else ""

    def feed(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        piece = added_text(text, self._known)
        if piece:  # start the next window at this token: what precedes it is complete and does not change
            self._window = [token]
            self._known = self._decode(self._window)
        return piece

    def finish(self) -> str:
        """What was held back, unfinished as it is."""
        text = self._decode(self._window) if self._window else ""
        piece, self._known = added_text(text, self._known), text
        return piece


def added_text(whole: str, known: str) -> str:
    """What `whole` has beyond `known`, whose end may have been half a character."""
    known = known if whole.startswith(known) else known.rstrip(REPLACEMENT)
    return whole[len(known) :]
