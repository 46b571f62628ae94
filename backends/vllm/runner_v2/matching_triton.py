"""`matching.draft` as one Triton kernel: its programs scan blocks of own text and passages, and the last one drafts.

A place's score holds its match length and, below it, its rank among places with that match length, so that the best
place is the maximum. Scores are int64; 0 is no match.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# pyright: reportMissingImports=false, reportIndexIssue=false
# (Triton has no types for the arguments of a kernel.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from agentspec.backends.vllm.runner_v2.matching import DEPTH
from agentspec.backends.vllm.runner_v2.passages import PassageShape

_BLOCK = 256  # places of own text that one program scans


@triton.jit
def _match_lengths(text, places, valid, end, length, DEPTH: tl.constexpr) -> Any:
    """How many tokens before each place equal those before `end`, of which there are `length`."""
    found = tl.zeros_like(places)
    alive = valid
    for back in tl.static_range(DEPTH):
        wanted = tl.load(end - 1 - back, mask=length > back, other=-2)
        there = tl.load(text + places - 1 - back, mask=alive & (places > back), other=-1)
        alive = alive & (there == wanted)
        found += alive.to(tl.int64)
    return found


@triton.jit
def _tokens_after(
    best, text, length, passages, chances, columns,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, DRAFT: tl.constexpr, DRAFT_2: tl.constexpr,
) -> Any:  # fmt: skip
    """The tokens after the place of the score `best`, or the text's last token where there are none. Writes the chances
    of those of a passage, and -1 of others.
    """
    ahead = tl.arange(0, DRAFT_2).to(tl.int64)
    score = tl.zeros_like(ahead) + best  # a block, as the masks below are: the interpreter mixes no scalars into them
    rank = score % (columns + COUNT * WIDTH + 1)
    inside = (ahead < DRAFT) & (score > 0)
    place = columns + COUNT * WIDTH - rank  # of a passage, counted over all passages of the request
    of_passage = inside & (rank > columns) & (place % WIDTH + ahead < WIDTH)
    of_own = inside & (rank < columns)
    left = tl.maximum(length - rank, 1)
    found = tl.load(passages + place + ahead, mask=of_passage, other=-1)
    found = tl.where(of_own, tl.load(text + rank + ahead % left, mask=of_own, other=-1), found)
    last = tl.load(text + length - 1, mask=length > 0, other=0)
    chance = tl.load(passages + COUNT * WIDTH + place + ahead, mask=of_passage & (found >= 0), other=0)
    tl.store(chances + ahead, tl.where(inside & (rank > columns), chance, -1), mask=ahead < DRAFT)
    return tl.where(found < 0, last, found).to(tl.int64)


@triton.jit
def _draft(
    own, own_stride, rows, lengths, sampled, passages, best, arrived, drafts, ends, matches, chances, columns,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, OVERLAP: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, DRAFT: tl.constexpr, DRAFT_2: tl.constexpr, END: tl.constexpr, END_2: tl.constexpr,
) -> None:  # fmt: skip
    """Score one of the COUNT passages, or one of the blocks of own text, which come after them. The last program of a
    request to do so writes its draft.
    """
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + request).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    text = own + row * own_stride
    scale = columns + COUNT * WIDTH + 1
    reading = tl.load(sampled + request) == 0
    parts = tl.where(reading, 1, COUNT + tl.cdiv(length, BLOCK)).to(tl.int32)
    if part < parts:
        score = tl.zeros((), tl.int64)
        if part >= COUNT:
            places = (part - COUNT) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
            found = _match_lengths(text, places, places < length, text + length, length, DEPTH)
            score = tl.max(tl.where(found > 0, found * scale + places, 0), axis=0)
        elif parts > 1:
            places = tl.arange(0, WIDTH_2).to(tl.int64)
            first = passages + (2 * row * COUNT + part) * WIDTH
            after = tl.load(first + places, mask=places < WIDTH, other=-1)
            found = _match_lengths(first, places, (after >= 0) & (places >= OVERLAP), text + length, length, DEPTH)
            rank = columns + COUNT * WIDTH - (part * WIDTH + places)
            score = tl.max(tl.where(found > 0, found * scale + rank, 0), axis=0)
        tl.atomic_max(best + request, score)
        if tl.atomic_add(arrived + request, 1) == parts - 1:  # all others of the request have scored
            score = tl.atomic_max(best + request, tl.zeros((), tl.int64))
            tl.store(best + request, tl.zeros((), tl.int64))  # for the next step
            tl.store(arrived + request, 0)
            tl.store(matches + request, score // scale)
            after = _tokens_after(
                score, text, length, passages + 2 * row * COUNT * WIDTH, chances + request * DRAFT, columns,
                COUNT, WIDTH, DRAFT, DRAFT_2,
            )  # fmt: skip
            ahead = tl.arange(0, DRAFT_2)
            tl.store(drafts + request * DRAFT + ahead, after, mask=ahead < DRAFT)
            column = tl.arange(0, END_2).to(tl.int64)
            of_text = (column > 0) & (column < END) & (length - END + column >= 0)
            token = tl.load(text + length - END + column, mask=of_text, other=0)
            count = tl.load(sampled + request).to(tl.int32)
            tl.store(ends + request * END + column, tl.where(column == 0, count, token), mask=column < END)


class PassageMatcher:
    """Drafts `tokens` for each of at most `requests` requests, whose texts lie in rows of one tensor."""

    def __init__(self, requests: int, columns: int, tokens: int, shape: PassageShape, device: torch.device) -> None:
        self._columns, self._parts = columns, shape.rows + triton.cdiv(columns, _BLOCK)
        self._best = torch.zeros(requests, dtype=torch.int64, device=device)  # score
        self._arrived = torch.zeros(requests, dtype=torch.int32, device=device)  # parts that have scored
        width = (shape.width, triton.next_power_of_2(shape.width))
        ends = (tokens + 2, triton.next_power_of_2(tokens + 2))
        self._sizes = (
            shape.rows, *width, shape.overlap, DEPTH, _BLOCK, tokens, triton.next_power_of_2(tokens), *ends
        )  # fmt: skip

    def draft(
        self,
        own: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        sampled: torch.Tensor,
        passages: torch.Tensor,
        drafts: torch.Tensor,
        ends: torch.Tensor,
        matches: torch.Tensor,
        chances: torch.Tensor,
    ) -> None:
        """Write `matching.draft` of each request into `drafts` (requests, tokens), int64 and contiguous, into
        `matches`, int64, and `chances`, int32, and its `matching.last_sampled` of `tokens` + 1 into `ends`.

        `own` (all rows, columns), `lengths` (all rows) and `passages` (all rows, all tokens and chances) are int32,
        `rows` (requests) says which row each request has. Requests with `sampled` (requests) of 0 are still reading
        their prompt: nothing is looked up for them. What has no row for each request may go on behind the last.
        """
        _draft[(len(drafts), self._parts)](
            own, own.stride(0), rows, lengths, sampled, passages, self._best, self._arrived, drafts, ends, matches,
            chances, self._columns, *self._sizes,
        )  # fmt: skip
