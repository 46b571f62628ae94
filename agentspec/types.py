"""The shared vocabulary: what a request asks for, what comes back, what was drafted.

Plain frozen dataclasses without behaviour beyond validation. This module imports nothing of agentspec's
except the error tree, and no third-party package at run time, so that every layer may use it for free.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agentspec.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_TENANT = "default"

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "cancelled"]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Namespace:
    """What isolates cached tokens: drafts never cross a namespace.

    A tenant comes from an API key or the operator's settings, never from a request. The three hashes say
    which model, tokenizer and chat template the token ids belong to; they are empty where no model is involved.
    """

    tenant: str
    model_fingerprint: str = ""
    tokenizer_hash: str = ""
    template_hash: str = ""

    @classmethod
    def of(cls, value: str | Namespace) -> Namespace:
        """A plain string means that tenant with no model."""
        return value if isinstance(value, Namespace) else cls(tenant=value)

    @property
    def key(self) -> str:
        """A stable 64-digit hexadecimal name for this namespace, usable as a database key."""
        parts = (self.tenant, self.model_fingerprint, self.tokenizer_hash, self.template_hash)
        return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Labels:
    """Who is asking: they select statistics and strategies, and never isolate or change an answer."""

    session: str | None = None
    workflow: str | None = None
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A token tree proposed for verification. All arrays have one row per node, in insertion order.

    `parents[i] < i`, and -1 means that the node continues the context itself; siblings carry distinct tokens.
    `probabilities[i]` is the probability that the whole path down to node i is accepted: it never grows along a
    path, and its sum over the tree is the expected number of accepted tokens.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    match_length: NDArray[np.int32]
    source: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.tokens)


class Source:
    """Values of `Draft.source`: where a node's token came from. The governor calibrates each separately."""

    SESSION = 0  # the session's own prompts and outputs
    SHARED = 1  # closed requests of the same namespace
    PREDICTION = 2  # the text a client sent as `prediction`
    NGRAM = 3  # the request's own text, without a token cache
    MODEL = 4  # a small model

    NAMES = ("session", "shared", "prediction", "ngram", "model")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Defaults are OpenAI's; `temperature` 0 is greedy.

    Raises `InvalidRequestError`, with `param` naming the field, for a value outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        self._require("temperature", 0.0, 2.0)
        self._require("top_p", 0.0, 1.0, exclude_low=True)
        self._require("top_k", 0, math.inf)
        self._require("min_p", 0.0, 1.0)
        self._require("presence_penalty", -2.0, 2.0)
        self._require("frequency_penalty", -2.0, 2.0)
        self._require("repetition_penalty", 0.0, math.inf, exclude_low=True)
        self._require("top_logprobs", 0, 20)
        if self.max_tokens is not None:
            self._require("max_tokens", 1, math.inf)
        if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise InvalidRequestError("logit_bias values must lie between -100 and 100", param="logit_bias")
        if isinstance(self.stop, str):
            raise InvalidRequestError(f"stop must be a tuple of strings, not {self.stop!r}", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not contain an empty string", param="stop")

    def _require(self, name: str, low: float, high: float, *, exclude_low: bool = False) -> None:
        value = getattr(self, name)
        if not (low < value if exclude_low else low <= value) or not value <= high:
            bounds = f"{'above' if exclude_low else 'at least'} {low}"
            bounds += "" if high == math.inf else f" and at most {high}"
            raise InvalidRequestError(f"{name} must be {bounds}, not {value!r}", param=name)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. Exactly one of `messages`, `text` and `token_ids` is the prompt.

    `extra` holds request fields that only an upstream understands; the local engine refuses what it cannot honour
    before it gets this far. `speculation=False` never changes the answer, only how it is computed. A request with a
    lower `priority` is served first, as in vLLM. `latency_target_ms_per_token` is what the stream should keep after
    its first token: drafts are spent on it before any are spent on throughput. It is a wish, never refused.
    """

    model: str
    messages: Sequence[Message] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    labels: Labels = field(default_factory=Labels)
    tenant: str = DEFAULT_TENANT
    continue_final: bool = False
    prediction: str | None = None
    speculation: bool = True
    store: bool = True
    priority: int = 0
    latency_target_ms_per_token: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name in ("messages", "text", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(f"give exactly one of messages, text and token_ids, not {given or 'none'}")
        if self.continue_final and self.messages is None:
            raise InvalidRequestError("continue_final needs messages", param="continue_final_message")
        target = self.latency_target_ms_per_token
        if target is not None and not 0 < target < math.inf:
            message = f"latency_target_ms_per_token must be above 0, not {target!r}"
            raise InvalidRequestError(message, param="latency_target_ms_per_token")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its natural-log probability under the model's raw distribution (before temperature)."""

    token_id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. The prediction counts are None unless the request carried a prediction."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for one generation. `steps` counts verification forwards, the first token's included.

    `estimated_seconds_saved` compares with the measured cost of one-token steps on the same engine: an estimate,
    since the run without speculation did not happen.
    """

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    estimated_seconds_saved: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. The last one carries `finish_reason`, `usage` and, where there was any, `speculation`.

    `extra` holds fields of an upstream's message delta that have no name here (`tool_calls`, `reasoning`, ...).
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    speculation: Speculation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
