"""One answer in the making: the decode loop, one turn at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch

from agentspec.backends.torch.codec import Codec
from agentspec.backends.torch.detokenizer import Detokenizer, StopScanner
from agentspec.backends.torch.drafters import Drafter, MergedDrafter, PredictionDrafter, SuffixDrafter
from agentspec.backends.torch.logprobs import token_logprob
from agentspec.backends.torch.memory import Memory
from agentspec.backends.torch.model import Rows, TargetModel
from agentspec.backends.torch.proposal import Proposer
from agentspec.backends.torch.sampler import Sampler
from agentspec.backends.torch.stats import Counters
from agentspec.backends.torch.verify import walk
from agentspec.governor import Governor
from agentspec.types import Delta, FinishReason, GenerateRequest, SamplingParams, TokenLogprob, Usage

PREFILL_CHUNK = 256  # tokens; between two chunks other streams get their turn and a cancellation is seen


@dataclass(slots=True, eq=False)
class Job:
    """A request made ready for the engine; `deliver` is called from the engine's thread and must not block."""

    request: GenerateRequest
    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    prediction: list[int] | None
    deliver: Callable[[Delta | Exception], None]
    cancelled: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling


@dataclass(slots=True)
class Shared:
    """What all generations of one engine use, one at a time."""

    target: TargetModel
    codec: Codec
    governor: Governor = field(default_factory=Governor)
    counters: Counters = field(default_factory=Counters)
    max_draft_tokens: int = 48

    def speculates(self, request: GenerateRequest) -> bool:
        return request.speculation and self.target.rewindable and self.max_draft_tokens > 0


class Generation:
    """The state of one answer. Between turns `rows` hold the key/value rows of all `tokens` but at least the last."""

    def __init__(self, job: Job, shared: Shared, rows: Rows, memory: Memory) -> None:
        self.job = job
        self.tokens = list(job.prompt)
        self.rows = rows
        self.finish: FinishReason | None = None
        self.started = perf_counter()
        self._shared = shared
        self._memory = memory
        self._reused = rows.length
        self._sampler = Sampler(job.sampling, shared.target.vocab_size, job.prompt, shared.target.device)
        self._detokenizer = Detokenizer(shared.codec.decode, job.prompt)
        self._scanner = StopScanner(job.sampling.stop)
        self._prediction = None if job.prediction is None else PredictionDrafter(job.prediction, len(job.prompt))
        drafter = self._drafter() if shared.speculates(job.request) else None
        self._proposer = Proposer(drafter, shared.governor, shared.counters, shared.target.vocab_size)
        self._logits = torch.empty(0)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def seed(self) -> int:
        """The request's seed, or the one drawn for it; with it the answer can be had again."""
        return self._sampler.seed

    def _drafter(self) -> Drafter:
        drafters: list[Drafter] = [SuffixDrafter(self._memory)]
        return MergedDrafter([*drafters, self._prediction] if self._prediction is not None else drafters)

    def advance(self) -> Delta | None:
        """One turn: a chunk of the prompt (None), or one round of propose, verify, commit (what it added)."""
        target, committed = self._shared.target, len(self.tokens)
        waiting = self.tokens[self.rows.length :]
        if len(waiting) > PREFILL_CHUNK and target.rewindable:
            target.prefill(self.rows, waiting[:PREFILL_CHUNK])
            self._shared.counters.prefill_tokens += PREFILL_CHUNK
            return None
        before, base = self.rows.length, len(waiting)
        draft = self._proposer.propose(self.tokens, self._budget(), base=base)
        started = perf_counter()
        self._logits = target.forward(self.rows, waiting, draft.tokens, draft.parents)
        self._sampler.begin(self._logits)
        path = walk(draft.tokens, draft.parents, self._sampler.choose, self._emit)
        self.rows.commit(base, path)
        fresh, seconds = self.tokens[committed:], perf_counter() - started
        self._shared.counters.prefill_tokens += base - 1 if committed == len(self.job.prompt) else 0
        self._proposer.learn(draft, path, base=base, rows=before, emitted=len(fresh), seconds=seconds)
        self._memory.extend(fresh)
        return self._delta(fresh)

    def close(self, *, clean: bool) -> None:
        """Let go of the cache: a `clean` end may be shared, any other stays partial."""
        self._memory.close(clean=clean)

    def _budget(self) -> int:
        """No more draft than the answer may still use: its last token needs no row of its own."""
        left = len(self.job.prompt) + self.job.max_tokens - len(self.tokens)
        return min(self._shared.max_draft_tokens, left - 1)

    def _emit(self, token: int, row: int) -> bool:
        """Commit one token, drawn from logits row `row`; True if the answer ends with it."""
        self.tokens.append(token)
        self._sampler.observe(token)
        if self.job.sampling.logprobs:
            entry = token_logprob(self._logits[row], token, self.job.sampling.top_logprobs, self._shared.codec.spell)
            self._logprobs.append(entry)
        if token in self.job.stop_ids:
            self.finish = "stop"
        else:
            self._text.append(self._scanner.feed(self._detokenizer.feed(token)))
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
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish,
            usage=self._usage() if self.finish else None,
            speculation=self._proposer.speculation if self.finish else None,
        )
        self._text, self._logprobs = [], []
        return delta

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
