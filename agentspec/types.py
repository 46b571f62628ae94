"""The data types that all packages share: requests, sampling parameters, deltas, drafts and counts.

They are plain frozen dataclasses, which check their values and hardly do more. This module imports only the error
classes of agentspec, and no third-party package at run time, so every layer may import it at no cost.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from agentspec.errors import InvalidRequestError
from agentspec.sampling_params import MAX_CHOICES as MAX_CHOICES
from agentspec.sampling_params import SamplingParams as SamplingParams
from agentspec.sampling_params import StructuredOutputs as StructuredOutputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_TENANT = "default"

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
    path, and its sum over the tree is the expected number of accepted tokens.
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
    children = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    node = -1
    for count, token in enumerate(output):
        if (node, token) not in children:
            return count
        node = children[node, token]
    return len(output)


class Source:
    """Values of `Draft.source`: where a node's token came from. The governor calibrates each source separately."""

    SESSION = 0  # the session's own prompts and outputs
    SHARED = 1  # finished requests of the same namespace
    PREDICTION = 2  # the text a client sent as `prediction`
    NGRAM = 3  # the request's own text, without a token cache
    MODEL = 4  # a small model
    GRAMMAR = 5  # tokens that the request's grammar forces

    NAMES = ("session", "shared", "prediction", "ngram", "model", "grammar")


@dataclass(frozen=True, slots=True)
class LossyAcceptance:
    """A rule by which a local engine accepts tokens of its draft model that are not the large model's own draws.

    `rule` "typical": tokens at least as likely as min(`epsilon`, `delta` * exp(-entropy)). "judge": tokens that the
    trained layer in the file `judge_head` finds right with a probability above `threshold`.
    """

    rule: Literal["typical", "judge"]
    epsilon: float = 0.09
    delta: float = 0.3
    threshold: float = 0.5
    judge_head: str | None = None

    @property
    def knobs(self) -> dict[str, Any]:
        """The settings that the answer depends on."""
        named = ("epsilon", "delta") if self.rule == "typical" else ("threshold",)
        return {"rule": self.rule, **{name: getattr(self, name) for name in named}}


def check_latency_goal(goal: object) -> None:
    """Raise `InvalidRequestError` for milliseconds per token that are no number above 0, within a float's range."""
    if not isinstance(goal, int | float) or isinstance(goal, bool) or not 0 < goal <= sys.float_info.max:
        name = "latency_target_ms_per_token"
        raise InvalidRequestError(f"{name} must be a number above 0", param=name)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. Exactly one of `messages`, `text` and `token_ids` is the prompt.

    `tools` have the form of OpenAI's API; `tool_choice` is "auto", "none", "required" or a tool's name.
    `template_arguments` are passed to the chat template (`enable_thinking`, say). `return_prompt` requests the prompt
    on the first delta. Reasoning before the answer is split off unless `split_reasoning` is off. With
    `include_reasoning` off the runtime hides it, and what would tell it: log-probabilities and token ids, as in vLLM.

    `extra` holds request fields that only an upstream understands; fields that the local engine does not support are
    refused earlier. `speculation=False` never changes the answer, only how it is computed. A request with a lower
    `priority` is served first, as in vLLM. `latency_target_ms_per_token` is the time per token that the stream should
    keep after its first token: drafts serve this target before they serve throughput. No request is refused for it.
    With `share=False` the local engine lets only requests of the same session draft from what it generates, for one
    part of an answer that `TorchBackend.record` gets as a whole.
    `thinking_budget` is the most tokens of thoughts; local models and delegating strategies can keep to it.
    `deadline_s` is the time in seconds that is left for the whole answer: a goal as well, which becomes a latency
    target where `max_tokens` is known. `strategy` is resolved by the runtime: see `StepPolicy`. `acceptance` makes the
    answers of a local model lossy; only the operator's settings set it. With `prefill_next` off nothing is read ahead
    after the answer.
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
    latency_target_ms_per_token: float | None = None
    deadline_s: float | None = None
    strategy: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    acceptance: LossyAcceptance | None = None
    prefill_next: bool = True

    def __post_init__(self) -> None:
        given = [name for name in ("messages", "text", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(f"give exactly one of messages, text and token_ids, not {given or 'none'}")
        if self.continue_final and self.messages is None:
            raise InvalidRequestError("continue_final needs messages", param="continue_final_message")
        if self.latency_target_ms_per_token is not None:
            check_latency_goal(self.latency_target_ms_per_token)
        if self.tools and self.messages is None:
            raise InvalidRequestError("tools need messages", param="tools")
        if self.tool_choice not in ("auto", "none") and not self._may_call(self.tool_choice):
            raise InvalidRequestError(f"tool_choice {self.tool_choice!r} is none of the tools", param="tool_choice")

    def _may_call(self, choice: str) -> bool:
        return bool(self.tools) and choice in ("required", *(tool["function"]["name"] for tool in self.tools))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its natural-log probability under the model's raw distribution (before temperature).

    `rank` counts from 1, the most probable token; 0 if the rank was not requested.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt as the model read it. `logprobs`, if requested, has no entry for the first token, which nothing
    precedes."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. The prediction counts are None unless the request carried a prediction.

    `reasoning_tokens` are those of `completion_tokens` that are thoughts; None where nobody counted them.
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
class LossyAcceptanceSpeculation(Speculation):
    """What speculation with a `LossyAcceptance` did for one answer: of its tokens, `substituted` were drafted and
    accepted in place of what the model would have drawn there.
    """

    lossy: bool = True
    strategy: str = "lossy_acceptance"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    substituted: int = 0


@dataclass(frozen=True, slots=True)
class StepSpeculation(Speculation):
    """What delegating reasoning steps did for one answer. It is lossy: the settings in `knobs` trade quality for speed.

    `drafted` and `accepted` count the small model's tokens, `steps` the reasoning steps. `spent_tokens` counts all
    tokens that each role generated, dropped ones included. `estimated_seconds_saved` compares the time of the reasoning
    with that of as many tokens at the base model's own pace, measured while it writes; below 0, time was lost.
    `degraded` maps each abandoned model to the reason. `trace` names the answer's file in the folder of traces.
    """

    steps_are_forwards = False
    lossy: bool = True
    strategy: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    proposed_steps: int = 0
    accepted_steps: int = 0
    kept_tokens: Mapping[str, int] = field(default_factory=dict)
    spent_tokens: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""
    degraded: Mapping[str, str] = field(default_factory=dict)
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class KnnSpeculation(Speculation):
    """What speculative retrieval did for one answer of KNN-LM. The answer equals that of a search for every token.

    `drafted` and `accepted` count guessed tokens. `wrong` counts the guesses that a search refuted; guesses after a
    wrong one are dropped unverified. `decided` tokens needed no neighbours. The others needed `queries`, sent in
    `searches` batches, whose sizes are in `strides`. The seconds are those of the model, of guessing beside it, and of
    searching the datastore.
    """

    lossy: bool = False
    strategy: str = "knnlm"
    wrong: int = 0
    decided: int = 0
    queries: int = 0
    searches: int = 0
    strides: tuple[int, ...] = ()
    model_seconds: float = 0.0
    guess_seconds: float = 0.0
    search_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RetrievalSpeculation(Speculation):
    """What guessing documents did for one answer. The answer equals that of sequential retrieval.

    `drafted` and `accepted` count the tokens generated from guessed documents, `steps` the rounds of the answer.
    `queries` counts the queries sent to the knowledge base in `batches`; `hit_rate` is the share of right guesses, None
    without guesses; `strides` has the number of guesses that each batch verified, 0 where generation waited for the
    document. `redone` counts batches that met another version of the knowledge base. `seconds` has the time by part of
    the work.
    """

    steps_are_forwards = False
    lossy: bool = False
    strategy: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    knowledge: str = ""
    queries: int = 0
    batches: int = 0
    hit_rate: float | None = None
    strides: tuple[int, ...] = ()
    redone: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. The last delta carries `finish_reason`, `usage` and, where there was any, `speculation`.

    With several choices, each has its `index` and its own last delta; the very last delta carries the totals. `extra`
    holds message fields without a name here: `tool_calls`, `reasoning` (also as `reasoning_content`), an upstream's own
    fields. `stop_reason` is the stop string that ended the choice, if one did and it is known.
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
