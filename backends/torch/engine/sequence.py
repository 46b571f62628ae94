"""One answer in the making: what it proposes, and what becomes of the logits that it gets."""

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
from agentspec.backends.torch.engine.speculator import Proposal, Speculator, StepCost
from agentspec.backends.torch.engine.stats import Counters
from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.model.kv_cache import Rows
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.acceptance import accept_path
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.speculation.governor import Governor
from agentspec.text.detokenizer import Detokenizer
from agentspec.text.stop_strings import StopScanner
from agentspec.types import Delta, FinishReason, GenerateRequest, Prompt, SamplingParams, TokenLogprob, Usage


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request made ready for the engine; `deliver` is called from the engine's thread and must not block."""

    request: GenerateRequest
    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    prediction: list[int] | None
    deliver: Callable[[Delta | Exception], None]
    cancelled: bool = False
    rules: ConstraintSpec = field(default_factory=ConstraintSpec)
    shares_prompt: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling


@dataclass(slots=True)
class EngineContext:
    """What all generations of one engine use, one at a time."""

    target: TargetModel
    codec: TokenizerAdapter
    governor: Governor = field(default_factory=Governor)
    counters: Counters = field(default_factory=Counters)
    max_draft_tokens: int = 48
    relieve: Callable[[], None] = lambda: None  # lets go of memory that is only kept to save time
    drafting: DrafterFactory = field(default_factory=DrafterFactory)
    draws_ahead: bool | None = None  # whether samplers do; None: where waiting for the device is dear

    def speculates(self, request: GenerateRequest) -> bool:
        return request.speculation and self.target.rewindable and self.max_draft_tokens > 0


class Generation:
    """The state of one answer. Between steps `rows` hold the key/value rows of all `tokens` but at least the last.

    They may be replaced by fewer: what is missing is computed again.
    """

    def __init__(self, job: EngineRequest, shared: EngineContext, rows: Rows, memory: CacheSession) -> None:
        self.job = job
        self.tokens = list(job.prompt)
        self.rows = rows
        self.finish: FinishReason | None = None
        self.started = perf_counter()
        self._first_at: float | None = None
        self._shared = shared
        self._memory = memory
        self._reused = self._charged = rows.length
        target = shared.target
        limits = job.rules.limits(job.sampling.min_tokens, job.stop_ids, target.vocab_size)
        self.sampler = Sampler(
            job.sampling,
            target.vocab_size,
            job.prompt,
            target.device,
            choice=job.rules.choice,
            limits=limits,
            ahead=shared.draws_ahead,
        )
        self._detokenizer = Detokenizer(shared.codec.decoder(job.rules.shown), job.prompt)
        self._scanner = StopScanner(job.sampling.stop)
        self._prediction = None if job.prediction is None else PredictionDrafter(job.prediction, len(job.prompt))
        self._drafter = self._open_drafter() if shared.speculates(job.request) else None
        self._proposer = Speculator(self._drafter, shared.governor, shared.counters, target.vocab_size, _step_name(job))
        self._scorer = self._prompt_scorer()
        self._prompt_due = job.request.return_prompt or self._scorer is not None
        self._logits = torch.empty(0)
        self._drawn_from: list[int] = []  # the rows of the logits behind this step's tokens
        self._text: list[str] = []

    @property
    def seed(self) -> int:
        """The request's seed, or the one drawn for it; with it the answer can be had again."""
        return self.sampler.seed

    def _open_drafter(self) -> Drafter:
        shared, job, constraint = self._shared, self.job, self.sampler.limits.constraint
        noise = SharedNoiseSampler(job.sampling, self.seed, job.rules.choice)
        drafter = shared.drafting.open(self._memory, self._prediction, noise, shared.governor.cost)
        return drafter if constraint is None else ConstrainedDrafter(drafter, constraint)

    def _prompt_scorer(self) -> PromptScorer | None:
        """For the first choice of a request that asks for it."""
        top, shared = self.job.sampling.prompt_logprobs, self._shared
        if top is None or self.job.rules.choice:
            return None
        return PromptScorer(shared.target, self.job.prompt, top, shared.codec.spell)

    @property
    def scorer(self) -> PromptScorer | None:
        """What has to score the prompt before it is read; None where nothing is left to score."""
        return None if self._scorer is None or self._scorer.done else self._scorer

    @property
    def unread(self) -> int:
        """Tokens that have no rows yet: the rest of the prompt, or the last token drawn."""
        return len(self.tokens) - self.rows.length

    def needs(self, step_seconds: float) -> float:
        """Tokens to gain in a step of so many seconds to hold the latency target; 0 where there is none."""
        target = self.job.request.latency_target_ms_per_token
        if target is None or self._first_at is None:
            return 0.0
        elapsed = perf_counter() - self._first_at + step_seconds
        return elapsed * 1000.0 / target - (self._emitted - 1)

    def charged(self) -> int:
        """Tokens computed for it since the last call, those that were computed again left out."""
        fresh = max(0, self.rows.length - self._charged)
        self._charged += fresh
        return fresh

    def propose(self) -> Proposal:
        """What may follow; no more than the answer may still use, since its last token needs no row of its own."""
        left = self.job.max_tokens - self._emitted
        return self._proposer.propose(self.tokens, min(self._shared.max_draft_tokens, left - 1))

    def learn(self) -> None:
        """A forward is under way, of which nothing is known yet."""
        self._memory.learn()

    def read(self, count: int) -> None:
        """The rows of `count` more tokens were computed, and there are more to come before the next draw."""
        self.rows.commit(count, ())
        self._shared.counters.prefill_tokens += count

    def begin(self, draft: Proposal, logits: Tensor) -> None:
        """Take the logits of a step, those after the last token read and after each draft node."""
        self._logits, self._drawn_from = logits, []
        self.sampler.begin(logits, draft.tokens, draft.parents)

    def commit(self, read: int, draft: Proposal, bill: StepCost) -> Delta:
        """Draw from the logits of a step that read `read` tokens; tell what was added."""
        committed = len(self.tokens)
        path = accept_path(draft.tokens, draft.parents, self.sampler.choose, self._emit)
        self.rows.commit(read, path)
        fresh = self.tokens[committed:]
        self._first_at = self._first_at or perf_counter()
        self._shared.counters.prefill_tokens += read - 1
        self._proposer.learn(draft, path, bill)
        self._memory.extend(fresh)
        return self._delta(fresh)

    def close(self, *, clean: bool) -> None:
        """Let go of the cache: a `clean` end may be shared, any other stays partial."""
        self._memory.close(clean=clean)
        if self._drafter is not None:
            self._drafter.close()

    def _emit(self, token: int, row: int) -> bool:
        """Commit one token, drawn from logits row `row`; True if the answer ends with it."""
        self.tokens.append(token)
        self.sampler.observe(token)
        self._drawn_from.append(row)
        if token in self.job.stop_ids:
            self.finish = "stop"
        else:
            piece = self._detokenizer.feed(token)
            self._text.append(self._scanner.feed(piece) if self._emitted > self.job.sampling.min_tokens else piece)
            if self._scanner.stopped:
                self.finish = "stop"
            elif self._emitted >= self.job.max_tokens:
                self.finish = "length"
        return self.finish is not None

    @property
    def _emitted(self) -> int:
        return len(self.tokens) - len(self.job.prompt)

    def _delta(self, fresh: list[int]) -> Delta:
        self._shared.counters.tokens += len(fresh)
        if self.finish is not None:
            self._text += self._tail()
        delta = Delta(
            text="".join(self._text),
            token_ids=tuple(fresh),
            logprobs=self._logprobs(fresh),
            finish_reason=self.finish,
            usage=self._usage() if self.finish else None,
            speculation=self._proposer.speculation if self.finish else None,
            prompt=self._prompt() if self._prompt_due else None,
        )
        self._prompt_due = False
        self._text = []
        return delta

    def _logprobs(self, fresh: list[int]) -> tuple[TokenLogprob, ...]:
        sampling = self.job.sampling
        if not sampling.logprobs:
            return ()
        rows = self._logits.index_select(0, to_device(torch.tensor(self._drawn_from), self._logits.device))
        return tuple(token_logprobs(rows, fresh, sampling.top_logprobs, self._shared.codec.spell))

    def _prompt(self) -> Prompt:
        request, ids = self.job.request, tuple(self.job.prompt)
        text = self._shared.codec.decode(ids) if request.text is None else request.text
        return Prompt(text, ids, None if self._scorer is None else self._scorer.finish())

    def _tail(self) -> list[str]:
        """What detokenizer and scanner still hold back, once nothing more will come."""
        if self._scanner.stopped:
            return []
        last = self._scanner.feed(self._detokenizer.finish())
        return [last] if self._scanner.stopped else [last, self._scanner.finish()]

    def _usage(self) -> Usage:
        prediction = self._prediction
        if prediction is not None:
            prediction.follow(self.tokens)
        return Usage(
            prompt_tokens=len(self.job.prompt),
            completion_tokens=self._emitted,
            cached_tokens=self._reused,
            accepted_prediction_tokens=None if prediction is None else prediction.accepted,
            rejected_prediction_tokens=None if prediction is None else prediction.rejected,
        )


def _step_name(job: EngineRequest) -> str | None:
    """The workflow step whose record of acceptance the request shares."""
    labels = job.request.labels
    named = labels.workflow is not None or labels.step is not None
    return f"{labels.workflow or ''}/{labels.step or ''}" if named else None
