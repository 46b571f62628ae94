"""Several answers (choices) to one request: gives each delta its index and sums up the usage of all choices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agentspec.protocol.deltas import summed
from agentspec.types import Delta, Speculation, Usage


@dataclass(slots=True)
class Choices:
    """Tracks `total` choices, of which `running` are being generated. The prompt's tokens are counted once."""

    total: int
    running: int = 1
    begun: bool = False
    _usages: list[Usage] = field(default_factory=list)
    _speculations: list[Speculation] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self._usages) == self.total

    def add(self, delta: Delta, index: int) -> Delta:
        """Label a delta with its choice `index`. Only the delta that ends the last choice carries the totals."""
        self.begun = True
        if delta.finish_reason is None:
            return replace(delta, index=index)
        self.running -= 1
        self._usages.append(delta.usage or Usage())
        self._speculations += [delta.speculation] if delta.speculation else []
        usage = _usage(self._usages) if self.done else None
        speculation = summed(self._speculations) if self.done else None
        return replace(delta, index=index, usage=usage, speculation=speculation)


def _usage(all: list[Usage]) -> Usage:
    first = all[0]
    return Usage(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(one.completion_tokens for one in all),
        cached_tokens=min(one.cached_tokens for one in all),
        accepted_prediction_tokens=_sum([one.accepted_prediction_tokens for one in all]),
        rejected_prediction_tokens=_sum([one.rejected_prediction_tokens for one in all]),
    )


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
