"""Hands the answer that a client predicts to our drafter in a vLLM server, and counts how much of it came true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from agentspec.backends.base import Forwards
from agentspec.backends.http import Endpoint
from agentspec.backends.openai.tokenization import ServerTokenization
from agentspec.backends.openai.vllm import XARGS
from agentspec.errors import InvalidRequestError, UpstreamError
from agentspec.protocol.messages import parse_prediction
from agentspec.speculation.predicted_text import TOKEN_CHARACTERS, PredictedText
from agentspec.types import Delta

FIELD = "agentspec_prediction"
"""The name in `vllm_xargs` of the prediction's token ids, which `backends/vllm/proposer.py` reads."""
MAX_TOKENS = 32_768
TOKENIZE_SECONDS = 2.0
MAX_CHARACTERS = 1 << 20  # of an answer that are compared with its prediction


async def prediction_fields(endpoint: Endpoint, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm_xargs` of a body with the fields `given`, with the token ids of its `prediction`; empty without one.

    The server itself turns the text into tokens (`/tokenize`). If it cannot, the request goes without: only drafts are
    lost.
    """
    theirs = given.get(XARGS) or {}
    if given.get("prediction") is None or not isinstance(theirs, Mapping) or FIELD in theirs:
        return {}
    try:
        most = _most_tokens(given)
        text = parse_prediction(given["prediction"])[: most * TOKEN_CHARACTERS]
        tokens = await ServerTokenization(endpoint, model, TOKENIZE_SECONDS).tokenize(text)
    except (UpstreamError, InvalidRequestError):
        return {}
    return {XARGS: {**theirs, FIELD: tokens[:most]}} if tokens else {}


def _most_tokens(given: Mapping[str, Any]) -> int:
    """How many tokens the answer may have."""
    bounds = [given.get(name) for name in ("max_completion_tokens", "max_tokens")]
    return min([MAX_TOKENS, *(one for one in bounds if type(one) is int and one > 0)])


class PredictionCounter:
    """Counts how many tokens of a prediction appear in an answer, since vLLM's own `usage` does not tell.

    The answer's text is turned into tokens by the server, as the prediction was, and followed along the prediction as
    the drafter follows it. Of several choices each has the whole prediction.
    """

    def __init__(self, predicted: Sequence[int], tokenization: ServerTokenization) -> None:
        self._predicted = predicted
        self._tokenization = tokenization
        self._texts: dict[int, list[str]] = {}
        self._room = MAX_CHARACTERS

    def add(self, text: str, choice: int = 0) -> None:
        """Take in a further piece of an answer."""
        kept = text[: self._room]
        self._room -= len(kept)
        self._texts.setdefault(choice, []).append(kept)

    async def counts(self) -> tuple[int, int] | None:
        """The accepted and the rejected tokens; None if the server does not tell the answer's tokens."""
        try:
            async with asyncio.timeout(TOKENIZE_SECONDS):
                answers = [await self._tokenization.tokenize("".join(pieces)) for pieces in self._texts.values()]
        except (UpstreamError, TimeoutError):
            return None
        return await asyncio.to_thread(self._compare, answers or [[]])

    def _compare(self, answers: Sequence[Sequence[int]]) -> tuple[int, int]:
        accepted = rejected = 0
        for answer in answers:
            followed = PredictedText(self._predicted)
            followed.follow(answer)
            accepted += followed.accepted
            rejected += followed.rejected
        return accepted, rejected

    async def counted(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta]:
        """Yield the deltas of an answer with one choice; a usage without prediction counts gets them."""
        async with aclosing(cast(Any, deltas)):
            async for delta in deltas:
                self.add(delta.text)
                usage = delta.usage
                if usage is not None and usage.accepted_prediction_tokens is None:
                    found = await self.counts()
                    if found is not None:
                        accepted, rejected = found
                        told = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
                        delta = replace(delta, usage=replace(usage, **told))
                yield delta


def prediction_counter(backend: Forwards, model: str, sent: Mapping[str, Any]) -> PredictionCounter | None:
    """Counts for an answer to a body with the fields `sent`, whose `prediction` was handed to a drafter; else None.

    A client may hand tokens over itself: what no prediction of ours would be is not followed.
    """
    arguments = sent.get(XARGS)
    predicted = arguments.get(FIELD) if isinstance(arguments, Mapping) else None
    if sent.get("prediction") is None or not isinstance(predicted, list) or len(predicted) > MAX_TOKENS:
        return None
    if not all(type(token) is int for token in predicted):
        return None
    return PredictionCounter(predicted, backend.tokenizer_of(model))
