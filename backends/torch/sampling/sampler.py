"""Draws tokens: processes logits, then applies Gumbel-max with noise that depends only on seed, position and token."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from agentspec.backends.torch.model.device import is_async_device, to_device
from agentspec.backends.torch.sampling.constraints import Constraints
from agentspec.types import SamplingParams

_WORD: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_BELOW_ONE: Final = 1 - 2.0**-24  # the largest float32 below 1


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mixed(word: int) -> int:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014) of one 64-bit word."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def position_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit noise key of one position of one answer, which `seed` and `choice` identify."""
    return _mixed(_mixed(_mixed(seed + _GOLDEN) ^ choice) + _GOLDEN * (position + 1))


def gumbel_noise(key: int | Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 for each of `token_ids` (int64): entry i is a pure function of (key, id i).

    For a column of keys, as signed words, the result has a row of noise for each key.

    splitmix64's output function at counter `id` gives 32 uniform bits v; -log1p(-v) is then a standard exponential,
    accurate where v is small, which is where the largest noise comes from, and its negative log is Gumbel.
    """
    z = token_ids * _signed(_GOLDEN) + (_signed(key) if isinstance(key, int) else key)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    bits = ((z ^ ((z >> 31) & ((1 << 33) - 1))) >> 32) & 0xFFFFFFFF
    return _gumbel(bits)


def _gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 for uniform 32-bit integers; finite for all of them."""
    # The largest 128 integers round to 1, whose noise would be -inf: as if the token were forbidden.
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)
    return -torch.log(-torch.log1p(-uniform))


class Sampler:
    """Chooses the tokens of one answer. Its history is the prompt and every token passed to `observe`.

    Processors run in vLLM's documented order: `constraints`; logit_bias; repetition (prompt and answer), frequency and
    presence penalties (answer); temperature; min_p; top_k; top_p. A draw depends only on the logits, the history, the
    seed, the answer's index and the absolute position, so that it is the same however the logits were computed.

    With `ahead` (None: True on asynchronous devices, where the host loses time by waiting) the sampler draws the tokens
    of all rows when the step begins, and they reach the host together. Otherwise it processes a row only when `choose`
    asks for its token. Greedy draws from unprocessed logits are so cheap that they are always made ahead.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        device: torch.device,
        *,
        choice: int = 0,
        constraints: Constraints | None = None,
        ahead: bool | None = None,
    ) -> None:
        self.constraints = constraints
        self._choice = choice
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.greedy = params.greedy
        self._params = params
        self._ahead = is_async_device(device) if ahead is None else ahead
        self._filters = not self.greedy and has_top_k_top_p(params, vocab_size)
        self._ids = torch.arange(vocab_size, device=device)
        self._bias = _bias_vector(params, vocab_size, device)
        self._penalised = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
        self._position = len(prompt)
        self._logits = torch.empty(0)
        self.pending: Tensor | None = None
        self.drawn: list[int] | None = None
        if self._penalised:
            self._counts = torch.zeros(vocab_size, device=device)
            self._prompted = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._prompted.index_fill_(0, to_device(torch.tensor(list(prompt), dtype=torch.long), device), True)

    @property
    def _free(self) -> bool:
        """Whether every token is allowed, now and for the rest of the answer."""
        return self.constraints is None or self.constraints.idle

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the one with the highest raw logit."""
        return self._raw and self._free

    @property
    def _raw(self) -> bool:
        return self.greedy and not self._penalised and self._bias is None

    def begin(self, logits: Tensor, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> None:
        """Take the raw float32 logits [rows, vocab] of a step: row 0 follows the history, row i + 1 node i of a tree.

        Draws ahead where possible, without waiting for the device; `fetch` then transfers several answers' tokens.
        """
        self._logits, self.drawn, self.pending = logits, None, None
        if (self._ahead or self._raw) and (self._free or not self._filters):
            self.pending = self._draw(logits, ancestor_tokens(tokens, parents))

    def choose(self, row: int) -> int:
        """Draw the token that follows the history from row `row`; of equal scores the lowest id wins."""
        fetch([self])
        if self.drawn is not None and (self._free or self._holds(self.drawn[row])):
            return self.drawn[row]
        return int(self._draw(self._allowed(row)[None], [()]))

    def probabilities(self, row: int) -> Tensor:
        """The distribution [vocab] from which the token after row `row` is drawn."""
        scores = self._penalties(self._allowed(row)[None], [()])[0]
        if self.greedy:
            return torch.zeros_like(scores).index_fill_(0, scores.argmax(), 1.0)
        return apply_top_k_top_p((scores / self._params.temperature)[None], self._params, may_sync=True)[0].softmax(-1)

    def observe(self, token: int) -> None:
        """Append `token` to the history."""
        self._position += 1
        if self.constraints is not None:
            self.constraints.observe(token)
        if self._penalised:
            self._counts[token] += 1

    def _allowed(self, row: int) -> Tensor:
        """The logits of row `row`, in which what is forbidden is minus infinity."""
        logits = self._logits[row]
        return logits if self.constraints is None else self.constraints.apply(logits)

    def may_draw(self, token: int) -> bool:
        """Whether no constraint bars `token`."""
        return self.constraints is None or self.constraints.allow(token)

    def _holds(self, token: int) -> bool:
        """Whether `token`, drawn without the constraints, would also be drawn with them. It would if it is allowed,
        since the best of all scores is then the best of the allowed ones; but not with min_p, top_k or top_p, whose
        result depends on which tokens are allowed.
        """
        return not self._filters and self.may_draw(token)

    def _draw(self, rows: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Draw one token id for each row of logits, which follows the history and then its path; returns [rows]."""
        scores = self._penalties(rows, paths)
        if self.greedy:
            return scores.argmax(-1)
        scores = apply_top_k_top_p(scores / self._params.temperature, self._params, may_sync=not self._ahead)
        keys = [position_key(self.seed, self._choice, self._position + len(path)) for path in paths]
        if self._filters and not self._ahead:
            return self._best_survivor(scores[0], keys[0])
        # The argmax of logits plus Gumbel noise is a draw from their softmax. The noise depends on seed, position and
        # token alone, so that each position gets the same draw as without a draft.
        column = to_device(torch.tensor([[_signed(key)] for key in keys]), scores.device)
        return (scores + gumbel_noise(column, self._ids)).argmax(-1)

    def _best_survivor(self, scores: Tensor, key: int) -> Tensor:
        """Draw from one filtered row [vocab], computing noise only for the tokens that are left; returns [1]."""
        ids = self._ids[scores > -math.inf]
        return ids[(scores[ids] + gumbel_noise(key, ids)).argmax(0, keepdim=True)]

    def _penalties(self, rows: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        if self._bias is not None:
            rows = rows + self._bias
        if self._penalised:
            scale, counts = self._params.repetition_penalty, self._counts_along(paths)
            seen = self._prompted | (counts > 0)
            rows = torch.where(seen, torch.where(rows > 0, rows / scale, rows * scale), rows)
            rows = rows - self._params.frequency_penalty * counts
            rows = rows - self._params.presence_penalty * (counts > 0)
        return rows

    def _counts_along(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """How often each token occurs in the answer followed by each path: [paths, vocab], or [vocab] if all paths are
        empty.
        """
        size = len(self._ids)
        places = [row * size + token for row, path in enumerate(paths) for token in path]
        if not places:
            return self._counts
        counts = self._counts.repeat(len(paths))
        where = to_device(torch.tensor(places), counts.device)
        return counts.scatter_add_(0, where, torch.ones_like(where, dtype=counts.dtype)).view(-1, size)


def fetch(samplers: Sequence[Sampler]) -> None:
    """Transfer the tokens that `samplers` have drawn ahead to the host, in one transfer that the host waits for."""
    drawing = [(sampler, sampler.pending) for sampler in samplers if sampler.pending is not None]
    if not drawing:
        return
    tokens = iter(torch.cat([pending for _, pending in drawing]).tolist())
    for sampler, pending in drawing:
        sampler.pending, sampler.drawn = None, list(islice(tokens, len(pending)))


def ancestor_tokens(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """For each row of a tree's logits, the drafted tokens on the path to it: none for row 0, then a path per node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


def _bias_vector(params: SamplingParams, vocab_size: int, device: torch.device) -> Tensor | None:
    if not params.logit_bias:
        return None
    bias = torch.zeros(vocab_size)
    for token, value in params.logit_bias.items():
        bias[token] = value
    return to_device(bias, device)


NUCLEUS_HEAD: Final = 1024  # candidates sorted first; whole rows are sorted only if these are too few


def has_top_k_top_p(params: SamplingParams, vocab_size: int) -> bool:
    """Whether `apply_top_k_top_p` may filter out any token."""
    return params.min_p > 0 or 0 < params.top_k < vocab_size or params.top_p < 1


def apply_top_k_top_p(scores: Tensor, params: SamplingParams, *, may_sync: bool) -> Tensor:
    """`scores` [rows, vocab] with the filtered tokens at minus infinity; equal scores at a boundary all stay.

    With `may_sync` the host may wait for the device, which avoids sorting whole rows when a few tokens are enough.
    """
    if params.min_p > 0:
        scores = _at_least(scores, scores.amax(-1, keepdim=True) + math.log(params.min_p))
    if 0 < params.top_k < scores.shape[-1]:
        best = scores.topk(params.top_k).values
        nucleus = params.top_p < 1
        return _at_least(scores, _nucleus_bound(best, _total(scores, best), params.top_p) if nucleus else best[:, -1:])
    if params.top_p < 1:
        total = scores.logsumexp(-1, keepdim=True)
        return _at_least(scores, _nucleus_bound(_best(scores, total, params.top_p, may_sync), total, params.top_p))
    return scores


def _at_least(scores: Tensor, bound: Tensor) -> Tensor:
    return scores.masked_fill(scores < bound, -math.inf)


def _total(scores: Tensor, best: Tensor) -> Tensor:
    """The log of the total weight of the `best` scores and of all scores equal to the last of them: [rows, 1]."""
    last = best[:, -1:]
    tied = (scores >= last).sum(-1, keepdim=True) - best.shape[-1]
    return best.logsumexp(-1, keepdim=True).logaddexp(last + tied.log())


def _best(scores: Tensor, total: Tensor, top_p: float, may_sync: bool) -> Tensor:
    """The best scores of each row in descending order, at least as many as the nucleus holds."""
    if may_sync and scores.shape[-1] > NUCLEUS_HEAD:
        head = scores.topk(NUCLEUS_HEAD).values
        if bool((_reached(head, total)[:, -1] >= top_p).all()):
            return head
    return scores.sort(-1, descending=True).values


def _nucleus_bound(best: Tensor, total: Tensor, top_p: float) -> Tensor:
    """The lowest score in the smallest set of best tokens whose probability reaches `top_p`: [rows, 1]."""
    inside = (_reached(best, total) < top_p).sum(-1, keepdim=True)
    return best.gather(-1, inside.clamp(max=best.shape[-1] - 1))


def _reached(best: Tensor, total: Tensor) -> Tensor:
    """The cumulative probability of the best scores, up to and including each."""
    return (best - total).exp().cumsum(-1)
