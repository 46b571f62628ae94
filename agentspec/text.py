"""Text that arrives in pieces: detokenising, stop strings, and the place in a predicted text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

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


ALIGN_LENGTHS = (2, 3, 4, 6, 8)  # numbers of tokens that must match to find the place in the prediction again
START_CONFIDENCE = 0.8
TOKEN_CHARACTERS = 16  # of a predicted text that are read for each token that the answer may have


class PredictedText:
    """Where an answer stands in its prediction, both as token ids.

    Before any output it stands at the beginning. After a divergence the answer's last tokens are looked up in the
    prediction, the longest match first, and the nearest place ahead of where it was is taken. `confidence` in the next
    token is the running rate of correct predictions.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.accepted = 0
        self.confidence = START_CONFIDENCE
        self._at: int | None = 0
        self._reached = 0
        self._last: deque[int] = deque(maxlen=max(ALIGN_LENGTHS))
        self._ids = np.asarray(tokens, dtype=np.int64)

    @property
    def rejected(self) -> int:
        """The number of predicted tokens that did not appear in the answer."""
        return max(0, len(self.tokens) - self.accepted)

    def ahead(self, count: int) -> list[int]:
        """At most `count` predicted tokens that follow the answer; empty if its place is not known."""
        return [] if self._at is None else self.tokens[self._at : self._at + count]

    def follow(self, fresh: Iterable[int]) -> None:
        """Follow further tokens of the answer, and count those that were predicted."""
        for token in fresh:
            self._last.append(token)
            self._step(token)

    def _step(self, token: int) -> None:
        at = self._at
        if at is not None and at < len(self.tokens):
            hit = self.tokens[at] == token
            self.confidence += 0.1 * (hit - self.confidence)
            if hit:
                self.accepted += 1
                self._at = self._reached = at + 1
                return
        self._at = self._aligned()

    def _aligned(self) -> int | None:
        """The position behind the best match of the answer's last tokens. Costs a pass over the prediction."""
        found = None
        ends = np.arange(1, max(1, len(self._ids)))
        for length, token in enumerate(reversed(self._last), start=1):
            ends = ends[ends >= length]
            ends = ends[self._ids[ends - length] == token]
            if not len(ends):
                break
            if length in ALIGN_LENGTHS:
                found = ends
        return None if found is None else int(found[min(np.searchsorted(found, self._reached), len(found) - 1)])
