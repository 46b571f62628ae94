"""Hands the answer that a client predicts to our drafter in a vLLM server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentspec.backends.http import Endpoint
from agentspec.backends.openai.tokenization import ServerTokenization
from agentspec.backends.openai.vllm import XARGS
from agentspec.errors import InvalidRequestError, UpstreamError
from agentspec.protocol.messages import parse_prediction
from agentspec.text import TOKEN_CHARACTERS

FIELD = "agentspec_prediction"
"""The name in `vllm_xargs` of the prediction's token ids, which `backends/vllm/proposer.py` reads."""
MAX_TOKENS = 32_768
TOKENIZE_SECONDS = 2.0


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
