"""The data types that all packages share: requests, sampling parameters, deltas, drafts and counts.

They are plain frozen dataclasses, which check their values and hardly do more. This module imports only the error
classes of agentspec, and no third-party package at run time, so every layer may import it at no cost.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from agentspec.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_TENANT = "default"
_TOKEN_BYTES = 16  # of a token besides its text, at least

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "cancelled"]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Isolates cached tokens: no draft comes from another namespace.

    A tenant comes from an API key or the operator's settings, never from a request. The three hashes name
    the model, tokenizer and chat template that the token ids belong to; they are empty where no model is involved.
    """

    tenant: str
    model_fingerprint: str = ""
    tokenizer_hash: str = ""
    template_hash: str = ""

    @property
    def key(self) -> str:
        """A stable 64-digit hexadecimal name for this namespace, usable as a database key."""
        parts = (self.tenant, self.model_fingerprint, self.tokenizer_hash, self.template_hash)
        return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Labels:
    """Identifies the caller. Labels select statistics and strategies; they neither isolate data nor change answers."""

    session: str | None = None
    workflow: str | None = None
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A token tree proposed for verification. All arrays have one row per node, in insertion order.

    `parents[i] < i`, and -1 means that the node continues the context itself; siblings carry distinct tokens.
    `probabilities[i]` is the probability that the whole path down to node i is accepted: it never grows along a
    path, and its sum over the tree is the expected number of accepted tokens. The cache's drafts are native objects
    with these attributes, which make an array whenever it is read.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    match_length: NDArray[np.int32]
    source: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.tokens)


def path_length(tokens: Sequence[int], parents: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens of `output`, from the first on, lie on a path of the tree of these tokens and parents."""
    node, count = -1, 0
    for child, (token, parent) in enumerate(zip(tokens, parents, strict=True)):  # a child comes after its parent
        if parent == node and count < len(output) and token == output[count]:
            node, count = child, count + 1
    return count


class Source:
    """Values of `Draft.source`: where a node's token came from. The governor calibrates each source separately."""

    SESSION = 0  # the session's own prompts and outputs
    SHARED = 1  # finished requests of the same namespace
    PREDICTION = 2  # the text a client sent as `prediction`
    MODEL = 3  # a small model
    GRAMMAR = 4  # tokens that the request's grammar forces

    NAMES = ("session", "shared", "prediction", "model", "grammar")


MAX_CHOICES = 128
GREEDY_BELOW = 1e-5  # below this temperature, scaling would overflow before it changed anything


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form an answer must have; exactly one kind of form is given. The names are vLLM's.

    `json` is a JSON schema, `json_object` allows any JSON object, `regex` matches the whole answer, `choice` lists the
    allowed answers, `grammar` is a context-free grammar in Lark's notation with the rule `start`.
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
    """Marks a number that was not given, through `replace` too: servers have defaults of their own in its place, as
    vLLM those of the model's generation config.
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
    with `ignore_eos` the model's end token never does. `bad_words` never appear.

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
        """Whether the caller chose the field's value: one that differs from the default, or a number equal to it."""
        value, default = getattr(self, name), getattr(_DEFAULTS, name)
        return not isinstance(value, _Default) and (isinstance(default, _Default) or bool(value != default))

    def _require(self, name: str, low: float, high: float, *, exclude_low: bool = False) -> None:
        value = getattr(self, name)
        if not (low < value if exclude_low else low <= value) or not value <= high:
            bounds = f"{'above' if exclude_low else 'at least'} {low}"
            bounds += "" if high == math.inf else f" and at most {high}"
            raise InvalidRequestError(f"{name} must be {bounds}, not {value!r}", param=name)


_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. Exactly one of `messages`, `text` and `token_ids` is the prompt.

    `tools` have the form of OpenAI's API; `tool_choice` is "auto", "none", "required" or a tool's name.
    `template_arguments` are passed to the chat template (`enable_thinking`, say). `return_prompt` requests the prompt
    on the first delta. Reasoning before the answer is split off unless `split_reasoning` is off. With
    `include_reasoning` off the runtime hides it, and what would tell it: log-probabilities and token ids, as in vLLM.

    `extra` holds request fields that only an upstream understands; fields that the local engine does not support are
    refused earlier. `speculation=False` never changes the answer, only how it is computed. A request with a lower
    `priority` is served first, as in vLLM. With `share=False` only requests of the same session are drafted from what
    it generates, for one part of an answer that `TorchBackend.record` gets as a whole. `thinking_budget` is the most
    tokens of thoughts; local models and delegating strategies can keep to it. `deadline_s` is the time in seconds that
    is left for the whole answer, a goal. `early_tools` is a count for a gateway's report;
    `token_sources` asks where each token came from.
    """

    model: str
    messages: Sequence[Message] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    labels: Labels = field(default_factory=Labels)
    tenant: str = DEFAULT_TENANT
    continue_final: bool = False
    start_answer: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    split_reasoning: bool = True
    include_reasoning: bool = True
    return_prompt: bool = False
    prediction: str | None = None
    speculation: bool = True
    store: bool = True
    share: bool = True
    priority: int = 0
    deadline_s: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    early_tools: int = 0
    token_sources: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("messages", "text", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(f"give exactly one of messages, text and token_ids, not {given or 'none'}")
        if self.continue_final and self.messages is None:
            raise InvalidRequestError("continue_final needs messages", param="continue_final_message")
        if self.tools and self.messages is None:
            raise InvalidRequestError("tools need messages", param="tools")
        choices = ["required", *(tool["function"]["name"] for tool in self.tools)] if self.tools else []
        if self.tool_choice not in ("auto", "none", *choices):
            raise InvalidRequestError(f"tool_choice {self.tool_choice!r} is none of the tools", param="tool_choice")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its natural-log probability under the model's raw distribution (before temperature).

    `rank` counts from 1, the most probable token; 0 if the rank was not requested.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt as the model read it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. The prediction counts are None unless the request carried a prediction.

    `reasoning_tokens` are those of `completion_tokens` that are thoughts; None where they were not counted.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for one generation. `steps` counts verification forwards, including the first token's;
    where a strategy counts other work, `forwards` is 0.

    `estimated_seconds_saved` compares the time taken with the measured cost of one-token steps on the same engine. It
    is an estimate, since the run without speculation did not happen.
    """

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    estimated_seconds_saved: float = 0.0
    steps_are_forwards: ClassVar[bool] = True

    @property
    def forwards(self) -> int:
        return self.steps if self.steps_are_forwards else 0


@dataclass(frozen=True, slots=True)
class RejectedDraft:
    """Drafted text that the model did not write, from the first token that differs on along its likeliest branch.
    `probability` is that token's, as in `TokenSource`.
    """

    text: str
    source: str
    probability: float


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where one token of an answer came from. `source` is one of `Source.NAMES`, None for the model's own draw.

    `probability` is the calibrated probability, before the model verified it, that the draft would be accepted up to
    here. `rejected` are the drafts for this place that were not. `forward` numbers the forwards of the answer from 0.
    """

    text: str
    source: str | None
    probability: float | None
    rejected: tuple[RejectedDraft, ...]
    forward: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. The last delta carries `finish_reason`, `usage` and, where there was any, `speculation`.

    With several choices, each has its `index` and its own last delta; the very last delta carries the totals. `extra`
    holds message fields without a name here: `tool_calls`, `reasoning` (also as `reasoning_content`), an upstream's own
    fields. `stop_reason` is the stop string that ended the choice, if one did and it is known. `decisions` are what
    a strategy decided since the delta before.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    speculation: Speculation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0
    prompt: Prompt | None = None
    stop_reason: str | None = None
    token_sources: tuple[TokenSource, ...] = ()
    decisions: tuple[Mapping[str, Any], ...] = ()

    def without_reasoning(self) -> Delta:
        """This delta without its thoughts, and without what would show them: log-probabilities, token ids, sources,
        decisions.
        """
        extra = {name: value for name, value in self.extra.items() if name not in ("reasoning", "reasoning_content")}
        return replace(self, token_ids=(), logprobs=(), token_sources=(), decisions=(), extra=extra)

    @property
    def size(self) -> int:
        """About how many bytes it adds to an answer that is stored."""
        prompt = self.prompt or Prompt()
        tokens = sum(_TOKEN_BYTES + len(one.text) for token in self.logprobs for one in (token, *token.top))
        extra = len(str(self.extra)) if self.extra else 0
        for one in self.token_sources:
            tokens += 4 * _TOKEN_BYTES + len(one.text) + sum(_TOKEN_BYTES + len(other.text) for other in one.rejected)
        texts, ids = len(prompt.text) + len(self.text), len(prompt.token_ids) + len(self.token_ids)
        return _TOKEN_BYTES + texts + extra + 8 * ids + tokens
