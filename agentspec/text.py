"""Text that arrives in pieces: detokenising and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(slots=True)
class StopScanner:
    """Passes text on up to the first stop string and holds back text that may be the beginning of one.

    Of several stop strings, the one that is complete first counts, and of those that are complete at the same place the
    longest. The result therefore does not depend on how the text was cut into pieces. `matched` is that stop string.
    """

    stops: tuple[str, ...]
    held: str = ""
    matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.matched is not None

    def feed(self, piece: str, *, counts: bool = True) -> str:
        """The text that can now be passed on; `stopped` is True once a stop string is complete.

        A stop string that ends in a piece that does not count is text like any other; it may only begin there.
        """
        if not self.stops:
            return piece
        text, known = self.held + piece, len(self.held)
        ends = ((text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self.stops if counts)
        found = [(at + len(stop), at, stop) for at, stop in ends if at >= 0]
        if found:  # cut the text before the stop string that is complete first
            (_, at, self.matched), self.held = min(found), ""
            return text[:at]
        keep = max((partial_end(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back; called when no more text will come."""
        held, self.held = self.held, ""
        return held


def partial_end(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
