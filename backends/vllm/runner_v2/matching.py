"""Matches a request's last tokens with its own text and its passages, and drafts what followed: plain torch.

The definition that the kernels of `matching_triton.py` are tested against, and what runs where there is no Triton. No
step reads a value of the device on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentspec.cache.index import CERTAIN

DEPTH = 16  # most tokens before a place that are compared
_PRIOR, _FADE = 6.0, 0.999  # tokens that an assumed rate counts for; decay per step of what was learned
_UNLIKE = -2  # equals no token, and not the -1 that fills passages


def draft(own: Tensor, lengths: Tensor, passages: Tensor, overlap: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` tokens that followed the best earlier occurrence of each request's end, int64 (requests, count); how
    many tokens are equal before it, int64 (requests); and the tokens' chances, in parts of `CERTAIN`, int32 (requests,
    count): 0 behind the end of a passage, -1 where none is known.

    `own` (requests, columns) holds each request's prompt and output, of which the first `lengths` (requests) tokens
    count; `passages` (requests, 2, passages, width) are tokens, filled up with -1, and their chances, and their first
    `overlap` tokens are own text, where no draft begins. A place with more equal tokens before it, up to `DEPTH`, is
    better. Of equals passages come first, by their order, and the earlier places of one before the later, as it is to
    be followed from its start; of own text the newest place comes first. A draft that reaches the end of own text goes
    on from where it began, since what repeats goes on repeating; what is missing otherwise is the request's last token.
    """
    end = _last_tokens(own, lengths)
    fallback = end[:, -1:].clamp(min=0)
    passages, chances = passages.unbind(1)
    own_score, own_place = _best_own(own, lengths, end)
    passage_score, passage_place = _best_passage(passages, overlap, end)
    from_passage = _read_passage(passages, passage_place, count)
    from_own = _read_own(own, lengths, own_place, count)
    is_passage, match = (passage_score >= own_score)[:, None], torch.maximum(passage_score, own_score)
    chosen = torch.where(is_passage, from_passage, from_own)
    chance = torch.where(from_passage < 0, 0, _read_passage(chances, passage_place, count))
    chance = torch.where(is_passage & (match > 0)[:, None], chance, -1).int()
    return torch.where((match == 0)[:, None] | (chosen < 0), fallback, chosen), match, chance


def last_sampled(own: Tensor, lengths: Tensor, rows: Tensor, sampled: Tensor, count: int) -> Tensor:
    """Of the requests in `rows` how many tokens were `sampled`, then the last `count` ones, which hold them; int32."""
    places = lengths.index_select(0, rows).long()[:, None] - count + torch.arange(count, device=own.device)
    tokens = own.take(rows[:, None] * own.shape[1] + places.clamp(min=0)).masked_fill(places < 0, 0)
    return torch.cat((sampled[:, None], tokens), dim=1).int()


def _last_tokens(own: Tensor, lengths: Tensor) -> Tensor:
    """The last `DEPTH` tokens of each request, the newest last; -2 before its beginning."""
    places = lengths.long()[:, None] - DEPTH + torch.arange(DEPTH, device=own.device)
    return torch.where(places >= 0, own.gather(1, places.clamp(min=0)).long(), _UNLIKE)


def match_lengths(text: Tensor, end: Tensor) -> Tensor:
    """How many tokens before each place of `text` (rows, columns) equal those of `end` (rows, DEPTH), from its end."""
    alive = torch.ones_like(text, dtype=torch.bool)
    found = torch.zeros_like(text, dtype=torch.int64)
    for back in range(min(DEPTH, text.shape[1])):
        before = pad(text, (back + 1, 0), value=-1)[:, : text.shape[1]]
        alive &= before == end[:, DEPTH - 1 - back, None]
        found += alive
    return found


def _best_own(own: Tensor, lengths: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The longest match in own text that has a token after it, and its newest place."""
    place = torch.arange(own.shape[1], device=own.device)
    found = match_lengths(own.long(), end) * (place < lengths[:, None])
    best = (found * own.shape[1] + place).argmax(dim=1)
    return found.gather(1, best[:, None])[:, 0], best


def _best_passage(passages: Tensor, overlap: int, end: Tensor) -> tuple[Tensor, Tensor]:
    """The longest match in the passages that has a token after it, and its first place in all passages' tokens."""
    rows, count, width = passages.shape
    text = passages.reshape(rows * count, width).long()
    place = torch.arange(width, device=passages.device)
    found = match_lengths(text, end.repeat_interleave(count, dim=0)) * ((text >= 0) & (place >= overlap))
    found = found.reshape(rows, count * width)
    first = torch.arange(count * width, 0, -1, device=passages.device)
    best = (found * (count * width + 1) + first).argmax(dim=1)
    return found.gather(1, best[:, None])[:, 0], best


def _read_passage(passages: Tensor, place: Tensor, count: int) -> Tensor:
    """`count` tokens of the passage from its `place` on, -1 after its end."""
    rows, _, width = passages.shape
    column = place[:, None] % width + torch.arange(count, device=passages.device)
    index = (place[:, None] // width * width + column).clamp(max=passages[0].numel() - 1)
    return torch.where(column < width, passages.reshape(rows, -1).gather(1, index).long(), -1)


def _read_own(own: Tensor, lengths: Tensor, place: Tensor, count: int) -> Tensor:
    """`count` tokens of own text from `place` on, and again from there after its end."""
    left = (lengths.long() - place).clamp(min=1)[:, None]
    return own.gather(1, place[:, None] + torch.arange(count, device=own.device) % left).long()


class MatchConfidence:
    """How often a drafted token is right after a match of each length, learned and read on the device. A token that was
    right makes the match before the next one longer.

    The token that comes after the verified ones is compared with the draft, too: what is verified no more because it
    seemed unlikely is learned from as long as it is drafted.
    """

    def __init__(self, requests: int, tokens: int, device: torch.device) -> None:
        lengths = torch.arange(DEPTH + 1, device=device)
        self._assumed = lengths / (lengths + 1.0)
        self._right = torch.zeros(DEPTH + 1, device=device)
        self._tried = torch.zeros_like(self._right)
        self._drafts = torch.zeros((requests, tokens), dtype=torch.int64, device=device)  # the last of each request
        self._match, self._lengths = torch.zeros((2, requests), dtype=torch.int64, device=device)  # before these
        self._steps = torch.arange(tokens, device=device)

    def observe(self, rows: Tensor, lengths: Tensor, sampled: Tensor, newest: Tensor) -> None:
        """Of the requests in `rows`, with texts of `lengths` now, so many tokens were `sampled`, the `newest` last."""
        match, accepted = self._match.index_select(0, rows), sampled[:, None].long() - 1
        same = self._lengths.index_select(0, rows) == lengths - sampled  # else these were another request's
        known = (same & (match > 0))[:, None] & (self._steps <= accepted)
        equal = self._drafts.index_select(0, rows) == newest[:, None]
        places = (match[:, None] + self._steps).clamp(max=DEPTH).flatten()
        for kept, new in ((self._tried, known), (self._right, known & ((self._steps < accepted) | equal))):
            kept.mul_(_FADE).index_add_(0, places, new.flatten().float())

    def of(self, rows: Tensor, lengths: Tensor, match: Tensor, drafts: Tensor, chances: Tensor) -> Tensor:
        """The probability of each drafted token (requests, tokens) after a `match` if those before it are right: its
        chance by the search, or how often others were right.
        """
        for kept, new in ((self._match, match), (self._lengths, lengths), (self._drafts, drafts)):
            kept.index_copy_(0, rows, new.long())
        rates = (self._right + _PRIOR * self._assumed) / (self._tried + _PRIOR)
        rates = rates[(match[:, None] + self._steps).clamp(max=DEPTH)]
        return torch.where(chances < 0, rates, chances / CERTAIN) * (match > 0)[:, None]
