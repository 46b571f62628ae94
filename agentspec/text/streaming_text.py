"""An answer's text as its tokens arrive: whole characters, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from agentspec.text.detokenizer import Decode, Detokenizer
from agentspec.text.stop_strings import StopScanner


class StreamingText:
    """Joined, what `feed` and `finish` return is the answer's text up to its first stop string."""

    def __init__(self, decode: Decode, prompt: Sequence[int], stops: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(decode, prompt)
        self._scanner = StopScanner(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: nothing more is returned."""
        return self._scanner.stopped

    def feed(self, token: int, *, may_stop: bool = True) -> str:
        """The text that `token` completes; without `may_stop` no stop string is looked for in it."""
        text = self._detokenizer.feed(token)
        return self._scanner.feed(text) if may_stop else text

    def finish(self) -> str:
        """What was held back, once nothing more will come."""
        if self.stopped:
            return ""
        last = self._scanner.feed(self._detokenizer.finish())
        return last if self.stopped else last + self._scanner.finish()
