"""Cuts text at a stop string while it arrives in pieces, holding back text that may become a stop string."""

from __future__ import annotations

from dataclasses import dataclass


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
