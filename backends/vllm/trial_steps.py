"""Steps that verify all likely tokens whatever the learned cost says, so that it cannot be wrong unnoticed.

While large steps are thought to be dear none is made, and what is thought of them is never corrected.
"""

from __future__ import annotations

LIKELY = 0.5  # a trial drafts tokens that are at least as likely, so that it gains something in any case
_FIRST = 8  # rounds before the first trial
_MOST = 256  # most rounds between two: each that finds nothing new doubles them
_CHEAPER = 0.25  # a trial that took less than expected by this share has found something, and the next round is one too


class TrialSteps:
    """Says which rounds are trials."""

    def __init__(self) -> None:
        self._wait, self._since = _FIRST, 0
        self._under_way = False

    def begin(self) -> bool:
        """Count a round whose chains may be of any length; True if it is a trial."""
        self._since += 1
        self._under_way = self._since >= self._wait
        if self._under_way:
            self._since = 0
        return self._under_way

    def measured(self, expected: float, seconds: float) -> None:
        """Learn what the step of the last round took, in seconds, and what was expected of its size."""
        if self._under_way:
            found = seconds < (1.0 - _CHEAPER) * expected
            self._wait = 1 if found else min(max(2 * self._wait, _FIRST), _MOST)
        self._under_way = False
