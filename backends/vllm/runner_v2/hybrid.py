"""Our passages next to a draft model in vLLM's Model Runner V2: each row of a step has the draft that should gain more.

The speculator that vLLM made for the configured method computes its drafts as ever; rows in which a passage matches
long enough are overwritten. Both drafters gain tokens in order, so the one whose next token is more often right gains
more, and is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agentspec.backends.vllm.runner_v2.matching import DEPTH, last_sampled
from agentspec.backends.vllm.runner_v2.retrieval import PassageRequest, PassageRetriever, SampledTokens
from agentspec.backends.vllm.runner_v2.speculator import PassageSpeculator
from agentspec.backends.vllm.runner_v2.verification import CertainDrafts, strict_rejection
from agentspec.cache.tokens import Tokens

NEVER = DEPTH + 1
"""A match length that no match has."""
PRIOR = 6.0  # tokens that an assumption counts for
MODEL_RATE = 0.7  # assumed share of a model's drafted tokens that are right
FADE = 0.998  # decay per step of what was learned over all requests
REQUEST_FADE = 0.9  # of what was learned of one: predictability changes within a text
_NOTES = 6  # columns before a step's tokens: their number, and what `_noted` says
_NO_TOKEN = -1


@dataclass(slots=True)
class HitRate:
    """How often a drafter's next token was right, as decaying counts; what followed a wrong token does not count."""

    hits: float = 0.0
    tries: float = 0.0

    def observe(self, right: int, known: int, fade: float) -> None:
        """The first `right` tokens of a draft were, of which `known` could be compared with the output."""
        self.hits = self.hits * fade + right
        self.tries = self.tries * fade + right + (right < known)

    def rate(self, assumed: float) -> float:
        return (self.hits + PRIOR * assumed) / (self.tries + PRIOR)


@dataclass(slots=True)
class RequestChoice:
    """One request's record."""

    ours: HitRate = field(default_factory=HitRate)
    expected: float = 0.0  # hits of ours, by the rates over all requests
    model: HitRate = field(default_factory=HitRate)
    follows: bool = False  # in the last known step it went on as a passage that matched for as long as is compared


class DrafterChoice:
    """What both drafters are expected to gain with drafts of `drafted` tokens. One thread has it learn, one asks it.

    Both are judged in each step by the tokens that the step confirmed, whichever of them was verified.
    """

    def __init__(self, drafted: int) -> None:
        self._drafted = drafted
        self._ours = [HitRate() for _ in range(DEPTH + 1)]  # by match length
        self._model = HitRate()

    def observe(self, request: RequestChoice, match: int, ours: int, model: int, known: int) -> None:
        """`known` tokens were confirmed, of which the first `ours` and `model` were drafted after a `match`."""
        known = min(known, self._drafted)
        model, ours = min(model, known), min(ours, known)
        self._model.observe(model, known, FADE)
        request.model.observe(model, known, REQUEST_FADE)
        if match == 0:
            return
        tries = ours + (ours < known)
        request.expected = request.expected * REQUEST_FADE + tries * self._rate(match)
        self._ours[match].observe(ours, known, FADE)
        request.ours.observe(ours, known, REQUEST_FADE)

    def least_match(self, request: RequestChoice) -> int:
        """The match length from which on passages are expected to gain more tokens than the model; else `NEVER`."""
        model = request.model.rate(self._model.rate(MODEL_RATE))
        factor = min(1.0, (request.ours.hits + PRIOR / 2) / (request.expected + PRIOR / 2))
        least = NEVER
        while least > 1 and factor * self._rate(least - 1) > model:
            least -= 1
        return least

    def _rate(self, match: int) -> float:
        """How often the next token after a match of that length is right."""
        return self._ours[match].rate(match / (match + 1.0))


class HybridSpeculator(PassageSpeculator):
    """Stands next to a speculator of vLLM's, the `model`, whose `propose` it calls and takes the place of."""

    def __init__(self, model: Any, vllm_config: Any, req_states: Any) -> None:
        """Opens the cache. Raises `ConfigurationError` and `CacheError`s."""
        self._model, self._propose_model = model, model.propose
        self.req_states, self.device = req_states, model.device
        self.max_num_reqs, self.max_model_len = model.max_num_reqs, model.max_model_len
        self.num_speculative_steps = model.num_speculative_steps
        self.open_cache(vllm_config, f" with the drafts of {vllm_config.speculative_config.method}")
        shape = (self.max_num_reqs, self.num_speculative_steps)
        self._choice = DrafterChoice(self.num_speculative_steps)
        self._ends, _ = self._memory()
        self._last_ours = torch.full(shape, _NO_TOKEN, dtype=torch.int64, device=self.device)
        self._last_model = self._last_ours.clone()
        self._last_match = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)
        self._last_used = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=self.device)
        self._last_count = torch.zeros_like(self._last_match)  # tokens that the model drafted
        parallel = vllm_config.parallel_config
        self._alone = parallel.tensor_parallel_size == parallel.data_parallel_size == 1  # else ranks draft in step
        self._perhaps = set[int]() if self._retriever else set(range(self.max_num_reqs))  # rows that may be used
        if model.draft_logits is not None:
            strict_rejection().ours[model.draft_logits.data_ptr()] = CertainDrafts(self._last_used, self._perhaps)
        if hasattr(model, "observe_verification"):
            self._observe_model, model.observe_verification = model.observe_verification, self.observe_verification

    def observe_verification(self, rows: torch.Tensor, sampled: torch.Tensor, rejected: torch.Tensor) -> None:
        """Have the model's speculator learn how often drafts are accepted from its own alone."""
        ours = self._last_used[rows.long()]
        self._observe_model(rows, sampled.masked_fill(ours, 1), rejected.masked_fill(ours, 0))

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *more: Any,
        dummy_run: bool = False,
        **how: Any,
    ) -> torch.Tensor:
        """Draft for each request of the batch. All arguments go to the model's speculator too.

        Where all requests are in the middle of passages, the model drafts one token, which keeps its state.
        """
        follow = not dummy_run and self._alone and all(map(self._follows, input_batch.req_ids))
        if follow and how.get("num_speculative_tokens") != 0:
            how["num_speculative_tokens"] = 1
        states = (attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states)
        model: torch.Tensor = self._propose_model(input_batch, *states, num_sampled, *more, dummy_run=dummy_run, **how)
        if dummy_run:
            return model
        rows = input_batch.idx_mapping[: input_batch.num_reqs].long()
        ours = torch.full_like(model, 0 if follow else _NO_TOKEN)  # if ours fail: of the model's only one may be used
        if self._retriever is not None:
            count = how.get("num_speculative_tokens", self.num_speculative_steps)
            with self._failures.caught():
                ours = self._better(self._retriever, input_batch, num_sampled, rows, model, count, follow)
        ours = self.shared(ours)
        if self._adaptive:
            self.shared(self._model.draft_token_confidence_probs)
        used = ours[:, :1] >= 0
        self._last_used.index_copy_(0, rows, used[:, 0])
        return torch.where(used, ours, model)

    def _better(
        self,
        retriever: PassageRetriever,
        batch: Any,
        sampled: torch.Tensor,
        rows: torch.Tensor,
        model: torch.Tensor,
        count: int,
        follow: bool,
    ) -> torch.Tensor:
        """Our drafts (requests, tokens) where they should gain more than the `model`'s, of which there are `count`, or
        where all requests `follow` passages; else -1.
        """
        drafted = torch.full_like(rows, count)
        requests = [self._requests.get(identity) for identity in batch.req_ids]
        enough = [0 if follow else self._least(request) for request in requests]
        for row, least in zip(batch.idx_mapping_np.tolist(), enough, strict=True):
            (self._perhaps.discard if least == NEVER else self._perhaps.add)(row)
        own, lengths = self.req_states.all_token_ids.gpu, self.req_states.total_len.gpu
        noted = self._noted(own, lengths, rows, sampled), self._memory()[1]
        self._send(retriever, noted, requests, model.shape[1])  # first: what follows may fail
        self._upload(retriever)
        ours = torch.zeros_like(model)
        ends, matches, chances = self._ends, self._matches, self._chances
        self._match(own, lengths, batch.idx_mapping, sampled, self._passages[-1], ours, ends, matches, chances)
        match = torch.where(sampled[: len(requests)] > 0, matches[: len(requests)], 0)
        needed = torch.tensor(enough, pin_memory=self.device.type == "cuda")
        used = match >= needed.to(self.device, non_blocking=True)
        last = self._last_ours, self._last_model, self._last_match, self._last_count
        for kept, new in zip(last, (ours, model, match, drafted), strict=True):
            kept.index_copy_(0, rows, new.to(kept.dtype))
        if self._adaptive:
            texts = rows, lengths.index_select(0, rows)
            self._confidence.observe(*texts, sampled[: len(rows)], ends[: len(rows), -1])
            confidence = self._confidence.of(*texts, torch.where(used, match, 0), ours, chances[: len(rows)])
            theirs = self._model.draft_token_confidence_probs[: len(rows)]
            theirs.copy_(torch.where(used[:, None], confidence, theirs))
        return torch.where(used[:, None], ours, _NO_TOKEN)

    @property
    def _adaptive(self) -> bool:
        """Whether vLLM verifies what the model's speculator says is likely, which is known once that is loaded."""
        return bool(getattr(self._model, "enable_adaptive_verification", False))

    def _least(self, request: PassageRequest | None) -> int:
        if request is None or not request.state.drafts:
            return NEVER
        request.choice = request.choice or RequestChoice()
        return self._choice.least_match(request.choice)

    def _follows(self, identity: str) -> bool:
        request = self._requests.get(identity)
        return request is not None and request.state.drafts and request.choice is not None and request.choice.follows

    def _noted(self, own: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, sampled: torch.Tensor) -> Any:
        """Of each request: the number of new tokens, the last match, whether it was used, how many tokens the model
        drafted, how many of both drafts came true; then the new tokens.
        """
        tokens = last_sampled(own, lengths, rows, sampled, self.num_speculative_steps + 1)
        count = tokens[:, :1].long()
        steps = torch.arange(self.num_speculative_steps, device=own.device)
        places = (lengths.index_select(0, rows).long()[:, None] - count + steps).clamp(0, own.shape[1] - 1)
        came = torch.where(steps < count, own.take(rows[:, None] * own.shape[1] + places).long(), _NO_TOKEN - 1)
        drafts = (self._last_ours.index_select(0, rows), self._last_model.index_select(0, rows))
        right = [(draft == came).long().cumprod(dim=1).sum(dim=1, keepdim=True) for draft in drafts]
        noted = (self._last_match, self._last_used, self._last_count)
        notes = (kept.index_select(0, rows)[:, None] for kept in noted)
        return torch.cat((count, *notes, *right, tokens[:, 1:]), dim=1).int()

    def _take(
        self,
        retriever: PassageRetriever,
        sampled: SampledTokens,
        requests: Sequence[PassageRequest | None],
        drafted: int,
    ) -> None:
        """Learn which draft was right, and take in the tokens."""
        verified: list[tuple[PassageRequest, Tokens]] = []
        others: list[tuple[PassageRequest, Tokens]] = []
        news = zip(requests, *sampled.take(len(requests), _NOTES), strict=True)
        for request, tokens, (known, match, used, count, ours, model) in news:
            if request is None:
                continue
            record = request.choice
            if record is not None and known and request.drafted:
                self._choice.observe(record, match, ours, model, min(known, count))
                record.follows = bool(used) and match == DEPTH and ours == min(known, self.num_speculative_steps)
            (verified if used and request.drafted else others).append((request, tokens))
        retriever.advance(others)
        retriever.advance(verified, drafted)
