"""How long the answers of each step of a workflow are, as routers that plan ahead want to know."""

from __future__ import annotations

from collections import OrderedDict

from agentspec.types import Labels

MOST_STEPS = 4096  # that are remembered, of all tenants; those asked for last
ENOUGH = 3  # answers before a length is told
_NEWEST = 0.2  # weight of the newest answer in the mean
_Key = tuple[str, str | None, str | None]


class AnswerLengths:
    """A running mean of the tokens of answers for each tenant's workflow and step. Requests without either are not
    remembered.
    """

    def __init__(self) -> None:
        self._means: OrderedDict[_Key, tuple[int, float]] = OrderedDict()

    def observe(self, tenant: str, labels: Labels, tokens: int) -> None:
        key = _key(tenant, labels)
        if key is None:
            return
        count, mean = self._means.pop(key, (0, float(tokens)))
        self._means[key] = (count + 1, mean + (tokens - mean) * _NEWEST)
        if len(self._means) > MOST_STEPS:
            self._means.popitem(last=False)

    def expected(self, tenant: str, labels: Labels) -> int | None:
        """The tokens of the next answer; None while too few were seen."""
        count, mean = self._means.get(_key(tenant, labels) or ("", None, None), (0, 0.0))
        return max(1, round(mean)) if count >= ENOUGH else None


def _key(tenant: str, labels: Labels) -> _Key | None:
    named = labels.workflow is not None or labels.step is not None
    return (tenant, labels.workflow, labels.step) if named else None
