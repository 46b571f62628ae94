"""Bounds what one request may ask of an upstream: answers, tokens, alternatives, prompts, messages and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentspec.backends.base import COMPLETIONS, EMBEDDINGS, RESPONSES
from agentspec.errors import InvalidRequestError
from agentspec.protocol.requests import MAX_BIASES, MAX_MESSAGES, MAX_TOOLS
from agentspec.protocol.validation import MAX_PHRASE, MAX_STOPS
from agentspec.settings.server import ServerSettings
from agentspec.types import MAX_CHOICES

# OpenAI's names, and those of SGLang, TGI, llama.cpp and Ollama for the same amount.
_TOKENS = (
    "max_tokens max_completion_tokens max_output_tokens min_tokens max_new_tokens min_new_tokens n_predict"
    " num_predict".split()
)
_ALTERNATIVES = "top_logprobs prompt_logprobs logprobs n_probs".split()
CHOICES = ("n", "best_of", "n_choices", "beam_width", "num_beams")
_LISTS = ("stop", "stop_sequences", "stop_token_ids", "bad_words", "stop_regex")

MAX_LOGPROBS = 20
MAX_TEXTS = 2048  # of a request for embeddings


def check_amounts(fields: Mapping[str, Any], path: str, limits: ServerSettings) -> None:
    """Raise `InvalidRequestError` for an amount above its limit, or one that is not a whole number.

    Servers accept "9" and 9.0 as numbers and read negative ones as "all", so that only plain counts can be bounded.
    """
    choices = max(_count(fields, name, 1, MAX_CHOICES) for name in CHOICES)
    for name in _TOKENS:
        _count(fields, name, 0, limits.max_output_tokens, " (server.max_output_tokens)")
    for name in _ALTERNATIVES:
        if not isinstance(fields.get(name), bool):
            _count(fields, name, 0, MAX_LOGPROBS)
    _length(fields, "messages", MAX_MESSAGES)
    if path.startswith(RESPONSES):
        _length(fields, "input", MAX_MESSAGES)
    _length(fields, "tools", MAX_TOOLS)
    _length(fields, "functions", MAX_TOOLS)
    _length(fields, "logit_bias", MAX_BIASES)
    for name in _LISTS:
        _length(fields, name, MAX_STOPS)
        _phrases(name, fields.get(name))
    if path == COMPLETIONS and _texts(fields.get("prompt")) * choices > MAX_CHOICES:
        raise InvalidRequestError(f"the request asks for more than {MAX_CHOICES} answers", param="prompt")
    if path == EMBEDDINGS and _texts(fields.get("input")) > MAX_TEXTS:
        raise InvalidRequestError(f"input has more than {MAX_TEXTS} texts", param="input")


def _count(fields: Mapping[str, Any], name: str, low: int, high: int, setting: str = "") -> int:
    value = fields.get(name)
    if value is None:
        return low
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}{setting}", param=name)
    return value


def _length(fields: Mapping[str, Any], name: str, most: int) -> None:
    value = fields.get(name)
    if isinstance(value, (list, dict)) and len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} entries; {most} are allowed", param=name)


def _phrases(name: str, value: Any) -> None:
    if any(isinstance(one, str) and len(one) > MAX_PHRASE for one in (value if isinstance(value, list) else [value])):
        raise InvalidRequestError(f"{name} may have at most {MAX_PHRASE} characters", param=name)


def _texts(value: Any) -> int:
    if not isinstance(value, list):
        return 1
    return max(1, sum(isinstance(item, (str, list, dict)) for item in value))
