"""One sequence: prompt and answer so far, what is proposed for it, and what its logits add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from agentspec.backends.torch.drafters import Drafter, DrafterFactory, PredictionDrafter
from agentspec.backends.torch.drafters.constrained import ConstrainedDrafter
from agentspec.backends.torch.drafters.shared_noise import SharedNoiseSampler
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.logprobs import PromptScorer, token_logprobs
from agentspec.backends.torch.engine.speculator import Proposal, Speculator, StepEstimate
from agentspec.backends.torch.engine.stats import Counters
from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.model.kv_cache import KVCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.acceptance import accept_path
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.speculation.governor import Governor
from agentspec.text.streaming_text import StreamingText
from agentspec.types import Delta, FinishReason, GenerateRequest, Prompt, SamplingParams, TokenLogprob, Usage


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One choice of a request made ready for the engine; `original` is the request as it came.

    `deliver` is called from the engine's thread and must not block.
    """

    original: GenerateRequest
    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    prediction: list[int] | None
    deliver: Callable[[Delta | Exception], None]
    cancelled: bool = False
    constraints: ConstraintSpec = field(default_factory=ConstraintSpec)
    shares_prompt: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return self.original.sampling

    @property
    def priority(self) -> int:
        return self.original.priority

    @property
    def tenant(self) -> str:
        return self.original.tenant


@dataclass(slots=True)
class EngineContext:
    """What all sequences of one engine use, one at a time."""

    target: TargetModel
    tokenizer: TokenizerAdapter
    governor: Governor = field(default_factory=Governor)
    counters: Counters = field(default_factory=Counters)
    max_draft_tokens: int = 48
    free_memory: Callable[[], None] = lambda: None  # lets go of memory that is only kept to save time
    drafters: DrafterFactory = field(default_factory=DrafterFactory)
    draws_ahead: bool | None = None  # whether samplers do; None: on asynchronous devices

    def speculates(self, request: GenerateRequest) -> bool:
        return request.speculation and self.target.rewindable and self.max_draft_tokens > 0


class Sequence:
    """A prompt and its answer so far. Between steps `kv_cache` covers all `tokens` but at least the last.

    It may be replaced by one that covers fewer: what is missing is computed again.
    """

    def __init__(
        self, request: EngineRequest, context: EngineContext, kv_cache: KVCache, session: CacheSession
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.kv_cache = kv_cache
        self.finish: FinishReason | None = None
        self.started = perf_counter()
        self._first_at: float | None = None
        self._context = context
        self._session = session
        self._reused = self._charged = kv_cache.length
        target = context.target
        constraints = request.constraints.start(request.sampling.min_tokens, request.stop_ids, target.vocab_size)
        self.sampler = Sampler(
            request.sampling,
            target.vocab_size,
            request.prompt,
            target.device,
            choice=request.constraints.choice,
            constraints=constraints,
            ahead=context.draws_ahead,
        )
        decode = context.tokenizer.decoder(request.constraints.shown)
        self._stream = StreamingText(decode, request.prompt, request.sampling.stop)
        predicted = request.prediction
        self._prediction = None if predicted is None else PredictionDrafter(predicted, len(request.prompt))
        self._drafter = self._open_drafter() if context.speculates(request.original) else None
        self._speculator = Speculator(
            self._drafter, context.governor, context.counters, target.vocab_size, _step_name(request)
        )
        self._scorer = self._prompt_scorer()
        self._prompt_due = request.original.return_prompt or self._scorer is not None
        self._logits = torch.empty(0)
        self._drawn_from: list[int] = []  # the rows of the logits behind this step's tokens
        self._text: list[str] = []

    @property
    def seed(self) -> int:
        """The request's seed, or the one drawn for it; with it the answer can be had again."""
        return self.sampler.seed

    def _open_drafter(self) -> Drafter:
        context, request, grammar = self._context, self.request, self.sampler.constraints.grammar
        noise = SharedNoiseSampler(request.sampling, self.seed, request.constraints.choice)
        drafter = context.drafters.open(self._session, self._prediction, noise, context.governor.cost)
        return drafter if grammar is None else ConstrainedDrafter(drafter, grammar)

    def _prompt_scorer(self) -> PromptScorer | None:
        """For the first choice of a request that asks for it."""
        top, context = self.request.sampling.prompt_logprobs, self._context
        if top is None or self.request.constraints.choice:
            return None
        return PromptScorer(context.target, self.request.prompt, top, context.tokenizer.spell)

    @property
    def scorer(self) -> PromptScorer | None:
        """What has to score the prompt before it is read; None where nothing is left to score."""
        return None if self._scorer is None or self._scorer.done else self._scorer

    @property
    def num_uncomputed(self) -> int:
        """Tokens that have no key/value slots yet: the rest of the prompt, or the last token drawn."""
        return len(self.tokens) - self.kv_cache.length

    @property
    def target_seconds_per_token(self) -> float | None:
        """The request's latency target."""
        target = self.request.original.latency_target_ms_per_token
        return None if target is None else target / 1000.0

    def required_tokens(self, step_seconds: float) -> float:
        """Tokens to gain in a step of so many seconds to hold the latency target; 0 where there is none."""
        target = self.request.original.latency_target_ms_per_token
        if target is None or self._first_at is None:
            return 0.0
        elapsed = perf_counter() - self._first_at + step_seconds
        return elapsed * 1000.0 / target - (self._emitted - 1)

    def take_computed(self) -> int:
        """Tokens computed for it since the last call, those that were computed again left out."""
        fresh = max(0, self.kv_cache.length - self._charged)
        self._charged += fresh
        return fresh

    def propose(self) -> Proposal:
        """What may follow; no more than the answer may still use, since its last token needs no slot of its own."""
        left = self.request.max_tokens - self._emitted
        return self._speculator.propose(self.tokens, min(self._context.max_draft_tokens, left - 1))

    def flush_to_cache(self) -> None:
        """A forward is under way: the token cache may learn what came before it."""
        self._session.flush_to_cache()

    def commit_chunk(self, count: int) -> None:
        """`count` more tokens of the prompt were computed, and there are more to come before the next draw."""
        self.kv_cache.commit(count, ())
        self._context.counters.prefill_tokens += count

    def begin(self, draft: Proposal, logits: Tensor) -> None:
        """Take the logits of a step, those after the last token read and after each draft node."""
        self._logits, self._drawn_from = logits, []
        self.sampler.begin(logits, draft.tokens, draft.parents)

    def commit(self, num_tokens: int, draft: Proposal, cost: StepEstimate) -> Delta:
        """Draw from the logits of a step that computed `num_tokens` tokens, the draft not counted; returns what was
        added.
        """
        committed = len(self.tokens)
        path = accept_path(draft.tokens, draft.parents, self.sampler.choose, self._emit)
        self.kv_cache.commit(num_tokens, path)
        fresh = self.tokens[committed:]
        self._first_at = self._first_at or perf_counter()
        self._context.counters.prefill_tokens += num_tokens - 1
        self._speculator.observe(draft, path, cost)
        self._session.extend(fresh)
        return self._delta(fresh)

    def close(self, *, clean: bool) -> None:
        """Let go of the token cache: a `clean` end may be shared, any other stays partial."""
        self._session.close(clean=clean)
        if self._drafter is not None:
            self._drafter.close()

    def _emit(self, token: int, row: int) -> bool:
        """Commit one token, drawn from logits row `row`; True if the answer ends with it."""
        self.tokens.append(token)
        self.sampler.observe(token)
        self._drawn_from.append(row)
        if token in self.request.stop_ids:
            self.finish = "stop"
        else:
            # Stop strings count only behind `min_tokens`: before, text passes unscanned.
            may_stop = self._emitted > self.request.sampling.min_tokens
            self._text.append(self._stream.feed(token, may_stop=may_stop))
            if self._stream.stopped:
                self.finish = "stop"
            elif self._emitted >= self.request.max_tokens:
                self.finish = "length"
        return self.finish is not None

    @property
    def _emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def _delta(self, fresh: list[int]) -> Delta:
        self._context.counters.tokens += len(fresh)
        if self.finish is not None:
            self._text.append(self._stream.finish())
        delta = Delta(
            text="".join(self._text),
            token_ids=tuple(fresh),
            logprobs=self._logprobs(fresh),
            finish_reason=self.finish,
            usage=self._usage() if self.finish else None,
            speculation=self._speculator.speculation if self.finish else None,
            prompt=self._prompt() if self._prompt_due else None,
        )
        self._prompt_due = False
        self._text = []
        return delta

    def _logprobs(self, fresh: list[int]) -> tuple[TokenLogprob, ...]:
        sampling = self.request.sampling
        if not sampling.logprobs:
            return ()
        rows = self._logits.index_select(0, to_device(torch.tensor(self._drawn_from), self._logits.device))
        return tuple(token_logprobs(rows, fresh, sampling.top_logprobs, self._context.tokenizer.spell))

    def _prompt(self) -> Prompt:
        request, ids = self.request.original, tuple(self.request.prompt)
        text = self._context.tokenizer.decode(ids) if request.text is None else request.text
        return Prompt(text, ids, None if self._scorer is None else self._scorer.finish())

    def _usage(self) -> Usage:
        prediction = self._prediction
        if prediction is not None:
            prediction.follow(self.tokens)
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self._emitted,
            cached_tokens=self._reused,
            accepted_prediction_tokens=None if prediction is None else prediction.accepted,
            rejected_prediction_tokens=None if prediction is None else prediction.rejected,
        )


def _step_name(request: EngineRequest) -> str | None:
    """The workflow step whose record of acceptance the request shares."""
    labels = request.original.labels
    named = labels.workflow is not None or labels.step is not None
    return f"{labels.workflow or ''}/{labels.step or ''}" if named else None
