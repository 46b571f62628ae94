"""One sequence: its request, its prompt and answer so far, the drafts proposed for it, and the tokens drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from agentspec.backends.torch.drafters.base import Drafter, SuffixDrafter
from agentspec.backends.torch.drafters.combined import ConstrainedDrafter, MergedDrafter, PredictionDrafter
from agentspec.backends.torch.drafters.draft_model import DraftModel, SharedNoiseSampler
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.speculator import Proposal, Speculator, StepEstimate, accept_path
from agentspec.backends.torch.engine.stats import Counters
from agentspec.backends.torch.engine.token_origins import TokenOrigins
from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.constraints import Constraints, ConstraintSpec
from agentspec.backends.torch.sampling.distribution import token_logprobs
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.protocol.speculation import MeasuredSpeculation
from agentspec.speculation.governor import Governor
from agentspec.text import Detokenizer, StopScanner
from agentspec.types import (
    Delta,
    FinishReason,
    GenerateRequest,
    Prompt,
    SamplingParams,
    Speculation,
    TokenLogprob,
    Usage,
)

DRAFTING = 5e-6  # seconds that a drafted token takes the cache and the governor, about


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One choice of a request, prepared for the engine; `original` is the request as the client sent it.

    The engine's thread calls `deliver`, which must not block.
    """

    original: GenerateRequest
    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    prediction: list[int] | None
    deliver: Callable[[Delta | Exception], None]
    cancelled: bool = False
    forgotten: bool = False
    """Whether a deletion came while it was open: nothing of it is stored."""
    constraints: ConstraintSpec = field(default_factory=ConstraintSpec)
    shares_prompt: bool = False
    guess: bool = False
    """Whether the prompt is only read, for a request that is expected to begin like it."""

    @property
    def sampling(self) -> SamplingParams:
        return self.original.sampling

    @property
    def tenant(self) -> str:
        return self.original.tenant

    def start_constraints(self, vocab_size: int) -> Constraints | None:
        """What bars tokens of the answer, from its start on; None if nothing does."""
        spec, least = self.constraints, self.sampling.min_tokens
        if not (spec.grammar or spec.bad_words or spec.thinking or least):
            return None
        return spec.start(least, self.stop_ids, vocab_size)


class AnswerText:
    """The text of one answer as its tokens are added; `finish` says why it ended, and is None before."""

    def __init__(self, request: EngineRequest, tokenizer: TokenizerAdapter) -> None:
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self._request = request
        self._detokenizer = Detokenizer(tokenizer.decoder(request.constraints.shown), request.prompt)
        self._scanner = StopScanner(request.sampling.stop)
        self._fresh: list[str] = []
        self.pieces: list[str] | None = None  # the text of each token of this step, where it is asked for

    def add(self, token: int) -> bool:
        """Append `token` to the answer; True if the answer is finished with it."""
        self.num_tokens += 1
        ends = token in self._request.stop_ids
        piece = "" if ends else self._detokenizer.feed(token)
        if self.pieces is not None:
            self.pieces.append(piece)
        if ends:
            self.finish = "stop"
        else:
            self._fresh.append(self._scanned(piece))
            if self._scanner.stopped:
                self.finish = "stop"
            elif self.num_tokens >= self._request.max_tokens:
                self.finish = "length"
        return self.finish is not None

    def _scanned(self, text: str) -> str:
        """The part of `text` that can be passed on. A stop string counts only if it ends after `min_tokens` tokens."""
        return self._scanner.feed(text, counts=self.num_tokens > self._request.sampling.min_tokens)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the answer; None if none did."""
        return self._scanner.matched

    def take(self) -> str:
        """The text added since the last call; when the answer is finished, also the text that was held back."""
        if self.finish is not None and not self._scanner.stopped:
            self._fresh.append(self._scanned(self._detokenizer.finish()))
            self._fresh.append(self._scanner.finish())
            if self._scanner.stopped:  # by a character that more tokens would have completed
                self.finish = "stop"
        text, self._fresh = "".join(self._fresh), []
        return text


def prompt_of(request: EngineRequest, tokenizer: TokenizerAdapter) -> Prompt:
    """The prompt as the model reads it."""
    ids, text = tuple(request.prompt), request.original.text
    shown = tokenizer.decode(ids) if text is None else text
    return Prompt(shown, ids)


def prompt_length(request: GenerateRequest) -> int:
    """The characters of the prompt, or the number of its token ids."""
    if request.messages is None:
        return len(request.text or request.token_ids or ())
    length = 0
    containers: list[Any] = [request.messages, request.tools]
    for one in containers:
        for item in one.values() if isinstance(one, Mapping) else one:
            if isinstance(item, str):
                length += len(item)
            elif isinstance(item, (Mapping, list, tuple)):
                containers.append(item)
    return length


@dataclass(slots=True)
class EngineContext:
    """The objects that all sequences of one engine share and use one at a time."""

    target: TargetModel
    tokenizer: TokenizerAdapter
    governor: Governor = field(default_factory=Governor)
    counters: Counters = field(default_factory=Counters)
    max_draft_tokens: int = 48
    spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    free_memory: Callable[[], None] = lambda: None  # frees memory that is held only to save time
    draft_model: DraftModel | None = None
    draws_ahead: bool | None = None  # `ahead` of every `Sampler`; None: True on asynchronous devices
    drawing: int = 1  # answers that the present step draws for

    def token_seconds(self, context: int) -> float:
        """What one token takes in a step without drafts, by all answers of the step with about `context` slots each."""
        batch = max(1, self.drawing)
        return self.governor.cost.seconds(batch, batch * context, batch) / batch

    def least(self, context: int) -> float:
        """The least probability with which a drafted token pays in a step like `token_seconds` has it."""
        batch = max(1, self.drawing)
        return self.governor.least(batch, batch * context, DRAFTING)

    def speculates(self, request: GenerateRequest) -> bool:
        return request.speculation and self.max_draft_tokens > 0


class Sequence:
    """A prompt and its answer so far. Between steps `kv_cache` holds a prefix of `tokens` without the last one."""

    def __init__(
        self, request: EngineRequest, context: EngineContext, kv_cache: SequenceCache, session: CacheSession
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.kv_cache = kv_cache
        self._context = context
        self._session = session
        self.reused = kv_cache.length
        target = context.target
        self.sampler = Sampler(
            request.sampling,
            target.vocab_size,
            request.prompt,
            target.device,
            choice=request.constraints.choice,
            constraints=request.start_constraints(target.vocab_size),
            ahead=context.draws_ahead,
        )
        self._answer = AnswerText(request, context.tokenizer)
        predicted = request.prediction
        self._prediction = None if predicted is None else PredictionDrafter(predicted, len(request.prompt))
        self._drafter = self._open_drafter() if context.speculates(request.original) else None
        self._speculator = Speculator(
            self._drafter, context.governor, context.counters, target.vocab_size, _step_name(request), request.tenant
        )
        self._prompt_due = request.original.return_prompt
        self._origins = TokenOrigins(context.tokenizer.spell) if request.original.token_sources else None
        self._answer.pieces = None if self._origins is None else self._origins.pieces
        self._logits = torch.empty(0)
        self._drawn_from: list[int] = []  # the row of logits that each token of this step was drawn from

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer has ended; None while it goes on."""
        return self._answer.finish

    @property
    def finished(self) -> bool:
        """Whether nothing is left to compute: the answer has ended, or a guess is read."""
        return self.finish is not None or (self.request.guess and self.num_uncomputed == 0)

    @property
    def seed(self) -> int:
        """The request's seed, or the one drawn for it; the same seed reproduces the answer."""
        return self.sampler.seed

    def _open_drafter(self) -> Drafter:
        context, request, constraints = self._context, self.request, self.sampler.constraints
        drafter: Drafter = SuffixDrafter(self._session.draft, context.least)
        if self._prediction is not None:
            drafter = MergedDrafter(drafter, self._prediction)
        if context.draft_model is not None:
            noise = SharedNoiseSampler(request.sampling, self.seed, request.constraints.choice)
            drafter = context.draft_model.gated(drafter, noise, context.token_seconds)
        grammar = None if constraints is None else constraints.grammar
        return drafter if grammar is None else ConstrainedDrafter(drafter, grammar)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that have no KV slots yet: the rest of the prompt, or the last token drawn."""
        return len(self.tokens) - self.kv_cache.length

    def propose(self) -> Proposal:
        """Propose drafts, at most as many tokens as the answer may still use; its last token needs no KV slot."""
        left = self.request.max_tokens - self._answer.num_tokens
        return self._speculator.propose(self.tokens, min(self._context.max_draft_tokens, left - 1))

    def flush_to_cache(self) -> None:
        """Let the token cache learn earlier tokens while a forward runs."""
        self._session.flush_to_cache()

    def commit_chunk(self, count: int) -> None:
        """Commit `count` computed prompt tokens; more of the prompt follows before the first draw."""
        self.kv_cache.commit(count, ())

    def begin(self, draft: Proposal, logits: Tensor) -> None:
        """Take the logits of a step: row 0 follows the last token read, row i + 1 follows draft node i."""
        self._logits, self._drawn_from = logits, []
        self.sampler.begin(logits, draft.tokens, draft.parents)

    def commit(self, num_tokens: int, draft: Proposal, cost: StepEstimate) -> Delta:
        """Draw tokens from the logits of a step that computed `num_tokens` tokens without the draft, commit them and
        return the delta they add.
        """
        committed = len(self.tokens)
        path = accept_path(draft.tokens, draft.parents, self.sampler.choose, self._emit)
        self.kv_cache.commit(num_tokens, path)
        fresh = self.tokens[committed:]
        self._speculator.observe(draft, path, cost)
        self._session.extend(fresh)
        delta = self._delta(fresh)
        return delta if self._origins is None else self._origins.traced(delta, draft, path)

    def close(self, *, clean: bool) -> None:
        """Close the token cache session and the drafter. Only a sequence that finished cleanly (`clean`) may be shared;
        an aborted one stays partial.
        """
        self._session.close(clean=clean, ended=not self.request.stop_ids.isdisjoint(self.tokens[-1:]))
        if self._drafter is not None:
            self._drafter.close()

    def _emit(self, token: int, row: int) -> bool:
        """Commit one token, drawn from logits row `row`; True if the answer ends with it."""
        self.tokens.append(token)
        self.sampler.observe(token)
        self._drawn_from.append(row)
        return self._answer.add(token)

    def _delta(self, fresh: list[int]) -> Delta:
        self._context.counters.tokens += len(fresh)
        delta = Delta(
            text=self._answer.take(),
            token_ids=tuple(fresh),
            logprobs=self._logprobs(fresh),
            finish_reason=self.finish,
            stop_reason=self._answer.stop_reason,
            usage=self._usage() if self.finish else None,
            speculation=self._speculation() if self.finish else None,
            prompt=prompt_of(self.request, self._context.tokenizer) if self._prompt_due else None,
        )
        self._prompt_due = False
        return delta

    def _speculation(self) -> Speculation | None:
        done, context = self._speculator.speculation, self._context
        if done is None or context.spec_decode_metrics == "none":
            return done
        detailed = context.spec_decode_metrics == "detailed"
        return MeasuredSpeculation.of(done, self._speculator.drafts, context.max_draft_tokens, detailed)

    def _logprobs(self, fresh: list[int]) -> tuple[TokenLogprob, ...]:
        sampling = self.request.sampling
        if not sampling.logprobs:
            return ()
        rows = self._logits.index_select(0, to_device(torch.tensor(self._drawn_from), self._logits.device))
        return token_logprobs(rows, fresh, sampling.top_logprobs, self._context.tokenizer.spell)

    def _usage(self) -> Usage:
        prediction = self._prediction
        if prediction is not None:
            prediction.follow(self.tokens)
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self._answer.num_tokens,
            cached_tokens=self.reused,
            accepted_prediction_tokens=None if prediction is None else prediction.accepted,
            rejected_prediction_tokens=None if prediction is None else prediction.rejected,
        )


def _step_name(request: EngineRequest) -> str | None:
    """The workflow step whose acceptance statistics the request shares; None if it names no workflow or step."""
    labels = request.original.labels
    named = labels.workflow is not None or labels.step is not None
    return f"{labels.workflow or ''}/{labels.step or ''}" if named else None
