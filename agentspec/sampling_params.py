"""How tokens are sampled, and the form that an answer must have. Import them from `agentspec.types`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from agentspec.errors import InvalidRequestError

SAMPLED = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias seed stop".split()
)
"""The fields of `SamplingParams` that every API which takes them calls so."""
MAX_CHOICES = 128
GREEDY_BELOW = 1e-5  # below this temperature, scaling would overflow before it changed anything


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form an answer must have; exactly one kind of form is given. The names are vLLM's.

    `json` is a JSON schema, `json_object` allows any JSON object, `regex` matches the whole answer, `choice` lists the
    allowed answers, `grammar` is a context-free grammar in Lark's or GBNF's notation with the rule `start` or `root`.
    `param` is the request's field that asks for it.
    """

    json: Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    param: str = field(default="structured_outputs", kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.given) != 1:
            listed = ", ".join(one.name for one in fields(self) if one.name != "param")
            message = f"structured_outputs needs exactly one of {listed}, not {[*self.given] or 'none'}"
            raise InvalidRequestError(message, param=self.param)
        if self.json_object is False:
            raise InvalidRequestError("structured_outputs.json_object must be true", param=self.param)
        if self.choice is not None and not all(self.choice or ("",)):
            raise InvalidRequestError(f"{self.param} must hold answers, none of them empty", param=self.param)

    @property
    def given(self) -> dict[str, Any]:
        """The kind of form that is given, with its value."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "param"}
        return {name: value for name, value in values.items() if value is not None}


class _Default:
    """Marks a number that nobody gave, through `replace` too: servers have defaults of their own in its place, as vLLM
    those of the model's generation config.
    """

    __slots__ = ()


class _Float(_Default, float):
    __slots__ = ()


class _Int(_Default, int):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. Defaults are OpenAI's; `temperature` 0 is greedy.

    `n` answers are sampled independently. Before `min_tokens` neither an end token nor a stop string ends an answer;
    with `ignore_eos` the model's end token never does. `bad_words` never appear. `prompt_logprobs` requests the
    log-probability of each prompt token, with those of that many most probable tokens at its position.

    Raises `InvalidRequestError`, with `param` naming the field, for a value outside its range.
    """

    temperature: float = _Float(1.0)
    top_p: float = _Float(1.0)
    top_k: int = _Int(0)
    min_p: float = _Float(0.0)
    presence_penalty: float = _Float(0.0)
    frequency_penalty: float = _Float(0.0)
    repetition_penalty: float = _Float(1.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    min_tokens: int = 0
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._require("temperature", 0.0, 2.0)
        self._require("top_p", 0.0, 1.0, exclude_low=True)
        self._require("top_k", 0, math.inf)
        self._require("min_p", 0.0, 1.0)
        self._require("presence_penalty", -2.0, 2.0)
        self._require("frequency_penalty", -2.0, 2.0)
        self._require("repetition_penalty", 1e-3, 1e3)  # beyond, logits would overflow or vanish in float32
        self._require("top_logprobs", 0, 20)
        self._require("n", 1, MAX_CHOICES)
        self._require("min_tokens", 0, math.inf if self.max_tokens is None else self.max_tokens)
        if self.prompt_logprobs is not None:
            self._require("prompt_logprobs", 0, 20)
        if self.max_tokens is not None:
            self._require("max_tokens", 1, math.inf)
        if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise InvalidRequestError("logit_bias values must lie between -100 and 100", param="logit_bias")
        if isinstance(self.stop, str):
            raise InvalidRequestError(f"stop must be a tuple of strings, not {self.stop!r}", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not contain an empty string", param="stop")
        if isinstance(self.bad_words, str) or any(not word.strip() for word in self.bad_words):
            raise InvalidRequestError("bad_words must be a tuple of words that are not blank", param="bad_words")

    @property
    def greedy(self) -> bool:
        """Whether the local engine takes the best token and draws nothing."""
        return self.temperature < GREEDY_BELOW

    def is_given(self, name: str) -> bool:
        """Whether somebody chose the field's value: one that differs from the default, or a number equal to it."""
        value, default = getattr(self, name), getattr(_DEFAULTS, name)
        return not isinstance(value, _Default) and (isinstance(default, _Default) or bool(value != default))

    def _require(self, name: str, low: float, high: float, *, exclude_low: bool = False) -> None:
        value = getattr(self, name)
        if not (low < value if exclude_low else low <= value) or not value <= high:
            bounds = f"{'above' if exclude_low else 'at least'} {low}"
            bounds += "" if high == math.inf else f" and at most {high}"
            raise InvalidRequestError(f"{name} must be {bounds}, not {value!r}", param=name)


_DEFAULTS = SamplingParams()
