"""`matching.draft` as Triton kernels: one scan over blocks of own text and passages, and one that drafts.

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
def _scan(
    own, own_stride, rows, lengths, sampled, passages, scores, columns,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, OVERLAP: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the best score of one block of own text, or of one of the COUNT passages, which come after the blocks."""
    request, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row = tl.load(rows + request).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    end = own + row * own_stride + length
    blocks = parts - COUNT
    best = tl.zeros((), tl.int64)
    if tl.load(sampled + request) > 0:
        scale = columns + COUNT * WIDTH + 1
        if part < blocks:
            if part * BLOCK < length:
                places = part * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
                found = _match_lengths(own + row * own_stride, places, places < length, end, length, DEPTH)
                best = tl.max(tl.where(found > 0, found * scale + places, 0), axis=0)
        else:
            places = tl.arange(0, WIDTH_2).to(tl.int64)
            first = (row * COUNT + part - blocks) * WIDTH
            after = tl.load(passages + first + places, mask=places < WIDTH, other=-1)
            found = _match_lengths(passages + first, places, (after >= 0) & (places >= OVERLAP), end, length, DEPTH)
            rank = columns + COUNT * WIDTH - ((part - blocks) * WIDTH + places)
            best = tl.max(tl.where(found > 0, found * scale + rank, 0), axis=0)
    tl.store(scores + request * parts + part, best)


@triton.jit
def _draft(
    own, own_stride, rows, lengths, sampled, passages, scores, drafts, ends, columns, parts,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, PARTS_2: tl.constexpr, DRAFT: tl.constexpr, DRAFT_2: tl.constexpr,
    END: tl.constexpr, END_2: tl.constexpr,
) -> None:  # fmt: skip
    """Write the tokens after the best place, or the request's last token where there are none; and how many tokens were
    sampled, before the last tokens of the text.
    """
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    part = tl.arange(0, PARTS_2)
    ahead = tl.arange(0, DRAFT_2).to(tl.int64)
    best = tl.max(tl.load(scores + request * parts + part, mask=part < parts, other=0), axis=0)
    score = tl.zeros_like(ahead) + best  # a block, as the masks below are: the interpreter mixes no scalars into them
    rank = score % (columns + COUNT * WIDTH + 1)
    inside = (ahead < DRAFT) & (score > 0)
    place = columns + COUNT * WIDTH - rank  # of a passage, counted over all passages of the request
    of_passage = inside & (rank > columns) & (place % WIDTH + ahead < WIDTH)
    of_own = inside & (rank < columns)
    text = own + row * own_stride
    left = tl.maximum(length - rank, 1)
    found = tl.load(passages + row * COUNT * WIDTH + place + ahead, mask=of_passage, other=-1)
    found = tl.where(of_own, tl.load(text + rank + ahead % left, mask=of_own, other=-1), found)
    last = tl.load(text + length - 1, mask=length > 0, other=0)
    tl.store(drafts + request * DRAFT + ahead, tl.where(found < 0, last, found).to(tl.int64), mask=ahead < DRAFT)
    column = tl.arange(0, END_2).to(tl.int64)
    of_text = (column > 0) & (column < END) & (length - END + column >= 0)
    token = tl.load(text + length - END + column, mask=of_text, other=0)
    count = tl.load(sampled + request).to(tl.int32)
    tl.store(ends + request * END + column, tl.where(column == 0, count, token), mask=column < END)


class PassageMatcher:
    """Drafts for requests whose texts lie in rows of one tensor. It owns the scores of at most `requests` requests."""

    def __init__(self, requests: int, columns: int, shape: PassageShape, device: torch.device) -> None:
        self._columns, self._parts = columns, triton.cdiv(columns, _BLOCK) + shape.rows
        self._shape = shape
        self._scores = torch.zeros((requests, self._parts), dtype=torch.int64, device=device)

    def draft(
        self,
        own: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        sampled: torch.Tensor,
        passages: torch.Tensor,
        drafts: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        """Write `matching.draft` of each request into `drafts` (requests, tokens), int64 and contiguous, and its
        `matching.last_sampled` into `ends`; returns how many tokens are equal before the place of each, int64.

        `own` (all rows, columns), `lengths` (all rows) and `passages` (all rows, all their tokens) are int32, `rows`
        (requests) says which row each request has. Requests with `sampled` (requests) of 0 are still reading their
        prompt: nothing is looked up for them.
        """
        count, overlap, width, _ = self._shape
        requests, tokens = drafts.shape
        _scan[(requests, self._parts)](
            own, own.stride(0), rows, lengths, sampled, passages, self._scores, self._columns,
            count, width, triton.next_power_of_2(width), overlap, DEPTH, _BLOCK,
        )  # fmt: skip
        _draft[(requests,)](
            own, own.stride(0), rows, lengths, sampled, passages, self._scores, drafts, ends, self._columns,
            self._parts, count, width, triton.next_power_of_2(self._parts), tokens, triton.next_power_of_2(tokens),
            ends.shape[1], triton.next_power_of_2(ends.shape[1]),
        )  # fmt: skip
        return self._scores[:requests].amax(dim=1) // (self._columns + count * width + 1)
