"""How many tokens a step must add to an answer so that it keeps the time per token that was asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LatencyGoal:
    """One answer's goal: from its first token on, a token every `seconds_per_token`."""

    seconds_per_token: float
    first_at: float | None = None

    def begin(self, now: float) -> None:
        """The answer's first token is there; later calls change nothing."""
        if self.first_at is None:
            self.first_at = now

    def required_tokens(self, tokens: int, now: float, step_seconds: float) -> float:
        """The tokens that a step of `step_seconds`, begun `now`, must add to an answer of `tokens` tokens to be on
        time at its end; 0 before the first token. All times are seconds of one clock.
        """
        if self.first_at is None:
            return 0.0
        return (now - self.first_at + step_seconds) / self.seconds_per_token - (tokens - 1)
