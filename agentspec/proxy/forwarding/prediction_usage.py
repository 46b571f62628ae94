"""Adds to the usage of a forwarded answer how much of the request's prediction appeared in it."""

from __future__ import annotations

from typing import Any

from agentspec.backends.openai.prediction import PredictionCounter
from agentspec.proxy.forwarding.answer_edits import AnswerEdits, choice_text

_DETAILS = "completion_tokens_details"
_ACCEPTED, _REJECTED = "accepted_prediction_tokens", "rejected_prediction_tokens"


class PredictionUsage(AnswerEdits):
    """Sets the prediction counts in the `usage` of one answer, as `counter` finds them.

    In a stream the chunk without choices that ends it gets them: the usage of others is not the last. Where the
    upstream counts by itself nothing is set.
    """

    def __init__(self, counter: PredictionCounter) -> None:
        self._counter = counter

    async def edits(self, answer: dict[str, Any], *, whole: bool) -> dict[str, Any]:
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                index = choice.get("index")
                self._counter.add(choice_text(choice), index if isinstance(index, int) else 0)
        usage = answer.get("usage")
        if not isinstance(usage, dict) or (choices and not whole):
            return {}
        details = usage.get(_DETAILS) or {}
        if not isinstance(details, dict) or details.get(_ACCEPTED) is not None:
            return {}
        counts = await self._counter.counts()
        if counts is None:
            return {}
        accepted, rejected = counts
        return {"usage": {**usage, _DETAILS: {**details, _ACCEPTED: accepted, _REJECTED: rejected}}}
