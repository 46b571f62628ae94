"""Drawing a token: the processed distribution, and Gumbel-max with noise that depends on position and token alone."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from agentspec.backends.torch.limits import Limits
from agentspec.types import SamplingParams

GREEDY_BELOW: Final = 1e-5  # colder than this, scaling would overflow before it changed anything
NUCLEUS_HEAD: Final = 1024  # candidates sorted before falling back to sorting them all
_WORD: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mixed(word: int) -> int:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014) of one 64-bit word."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def position_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit noise key of one position of one answer."""
    return _mixed(_mixed(_mixed(seed + _GOLDEN) ^ choice) + _GOLDEN * (position + 1))


def gumbel_noise(key: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 for each of `token_ids` (int64): entry i is a pure function of (key, id i).

    splitmix64's output function at counter `id` gives 32 uniform bits v; -log1p(-v) is then a standard exponential,
    accurate where v is small, which is where the largest noise comes from, and its negative log is Gumbel.
    """
    z = token_ids * _signed(_GOLDEN) + _signed(key)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    bits = ((z ^ ((z >> 31) & ((1 << 33) - 1))) >> 32) & 0xFFFFFFFF
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


class Sampler:
    """Chooses the tokens of one answer. Its history is the prompt and every token it was told to `observe`.

    Processors run in the documented order of vLLM: what `limits` bars; logit_bias; repetition (prompt and answer),
    frequency and presence penalties (answer); temperature; min_p; top_k; top_p. A choice depends on the logits, the
    history, the seed, the index of the answer and the absolute position, and on nothing else, so that it is the same
    however the logits came about.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        device: torch.device,
        *,
        choice: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._choice = choice
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.greedy = params.temperature < GREEDY_BELOW
        self._params = params
        self._ids = torch.arange(vocab_size, device=device)
        self._bias = _bias_vector(params, vocab_size, device)
        self._penalised = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
        self._position = len(prompt)
        self._best: list[int] | None = None
        self._logits = torch.empty(0)
        if self._penalised:
            self._counts = torch.zeros(vocab_size, device=device)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(list(prompt), dtype=torch.long, device=device)] = True

    @property
    def plain(self) -> bool:
        """Whether the next choice is the best score as it is."""
        return self.greedy and not self._penalised and self._bias is None and self.limits.idle

    def begin(self, logits: Tensor) -> None:
        """Take the raw float32 logits [rows, vocab] of a round."""
        self._logits = logits
        raw = self.greedy and not self._penalised and self._bias is None
        self._best = logits.argmax(-1).tolist() if raw else None

    def choose(self, row: int) -> int:
        """The token that follows the history, drawn from row `row`; the lowest id where greedy scores are equal."""
        if self._best is not None and (self.limits.idle or self.limits.allow(self._best[row])):
            return self._best[row]
        scores = self._penalties(self.limits.apply(self._logits[row]))
        if self.greedy:
            return int(scores.argmax())
        ids, scores = self._truncated(scores / self._params.temperature)
        noise = gumbel_noise(position_key(self.seed, self._choice, self._position), ids)
        return int(ids[(scores + noise).argmax()])

    def observe(self, token: int) -> None:
        """The answer now ends in `token`."""
        self._position += 1
        self.limits.observe(token)
        if self._penalised:
            self._counts[token] += 1
            self._seen[token] = True

    def _penalties(self, row: Tensor) -> Tensor:
        if self._bias is not None:
            row = row + self._bias
        if self._penalised:
            scale = self._params.repetition_penalty
            row = torch.where(self._seen, torch.where(row > 0, row / scale, row * scale), row)
            row = row - self._params.frequency_penalty * self._counts
            row = row - self._params.presence_penalty * (self._counts > 0)
        return row

    def _truncated(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The surviving ids and their scores, in order of id. Equal scores at a boundary survive together."""
        params, ids = self._params, self._ids
        if params.min_p > 0:
            ids, scores = _at_least(ids, scores, scores.max() + math.log(params.min_p))
        if 0 < params.top_k < len(ids):
            ids, scores = _at_least(ids, scores, scores.topk(params.top_k).values[-1])
        if params.top_p < 1:
            ids, scores = _at_least(ids, scores, _nucleus_bound(scores, params.top_p))
        return ids, scores


def _at_least(ids: Tensor, scores: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    keep = scores >= bound
    return ids[keep], scores[keep]


def _nucleus_bound(scores: Tensor, top_p: float) -> Tensor:
    """The lowest score inside the smallest set of best tokens whose probability reaches `top_p`."""
    total = scores.logsumexp(0)
    for size in (NUCLEUS_HEAD, len(scores)):
        best = scores.topk(min(size, len(scores))).values
        reached = torch.exp(best - total).cumsum(0)
        if reached[-1] >= top_p:
            break
    inside = int((reached < top_p).sum())
    return best[min(inside, len(best) - 1)]


def _bias_vector(params: SamplingParams, vocab_size: int, device: torch.device) -> Tensor | None:
    if not params.logit_bias:
        return None
    bias = torch.zeros(vocab_size, device=device)
    for token, value in params.logit_bias.items():
        bias[token] = value
    return bias
