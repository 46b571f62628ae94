"""Text cut at a stop string while it arrives in pieces: nothing that might become one is passed on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StopScanner:
    """Passes text on up to the first stop string, holding back what may be the beginning of one.

    Of several stop strings the one that is complete first counts, and of those the longest; therefore the result does
    not depend on how the text was cut into pieces.
    """

    stops: tuple[str, ...]
    held: str = ""
    stopped: bool = False

    def feed(self, piece: str) -> str:
        """The text now safe to pass on; `stopped` is True once a stop string is complete."""
        if not self.stops:
            return piece
        text = self.held + piece
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:  # the text is cut here, in front of the stop string that is complete first
            self.stopped, self.held = True, ""
            return text[: min(found)[1]]
        keep = max((partial_end(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when no more text will come."""
        held, self.held = self.held, ""
        return held


def partial_end(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
