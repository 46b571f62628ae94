"""Several answers to one request: the first reads the prompt for all, and the last to end has the totals of all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agentspec.protocol.speculation import summed
from agentspec.types import Delta, Speculation, Usage


@dataclass(slots=True)
class Choices:
    """Several answers to one request, `total` in all: gives each delta its index and sums up the usage of all. The
    prompt's tokens are counted once.
    """

    total: int
    _usages: list[Usage] = field(default_factory=list)
    _speculations: list[Speculation] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self._usages) == self.total

    def add(self, delta: Delta, index: int) -> Delta:
        """Label a delta with its choice `index`. Only the delta that ends the last choice carries the totals."""
        if delta.finish_reason is None:
            return replace(delta, index=index)
        self._usages.append(delta.usage or Usage())
        self._speculations += [delta.speculation] if delta.speculation else []
        usage = _usage(self._usages) if self.done else None
        speculation = summed(self._speculations) if self.done else None
        return replace(delta, index=index, usage=usage, speculation=speculation)


def _usage(all: list[Usage]) -> Usage:
    predicted = all[0].accepted_prediction_tokens is not None
    return Usage(
        prompt_tokens=all[0].prompt_tokens,
        completion_tokens=sum(one.completion_tokens for one in all),
        cached_tokens=min(one.cached_tokens for one in all),
        accepted_prediction_tokens=sum(one.accepted_prediction_tokens or 0 for one in all) if predicted else None,
        rejected_prediction_tokens=sum(one.rejected_prediction_tokens or 0 for one in all) if predicted else None,
    )
