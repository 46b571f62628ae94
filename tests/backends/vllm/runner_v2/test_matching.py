"""What is drafted on the device, against a search place by place."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.backends.vllm.runner_v2.matching import DEPTH, MatchConfidence, draft
from agentspec.cache.index import CERTAIN

OVERLAP, WIDTH, COUNT = 3, 8, 2
CHANCES = [list(range(100 * row, 100 * row + WIDTH)) for row in range(COUNT)]


def drafted_by_search(text: list[int], passages: list[list[int]], tokens: int) -> tuple[list[int], list[int]]:
    """The draft for one request, and its tokens' chances: every place is looked at, the best one wins."""

    def matched(place: int, there: list[int]) -> int:
        count = 0
        while count < min(DEPTH, place, len(text)) and there[place - 1 - count] == text[-1 - count]:
            count += 1
        return count

    best, found, chances = 0, [text[-1]] * tokens, [-1] * tokens
    for number, passage in enumerate(passages):
        for place in range(OVERLAP, len(passage)):
            if passage[place] >= 0 and matched(place, passage) > best:
                best = matched(place, passage)
                found = [token if token >= 0 else text[-1] for token in passage[place : place + tokens]]
                found += [text[-1]] * (tokens - len(found))
                followed = [at for at in range(place, min(place + tokens, len(passage))) if passage[at] >= 0]
                chances = [CHANCES[number][at] for at in followed] + [0] * (tokens - len(followed))
    for place in reversed(range(len(text))):
        if matched(place, text) > best:
            best = matched(place, text)
            found = [text[place + ahead % (len(text) - place)] for ahead in range(tokens)]
            chances = [-1] * tokens
    return found, chances


texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
rows_of_passages = st.lists(
    st.lists(st.integers(0, 2), max_size=WIDTH).map(lambda row: row + [-1] * (WIDTH - len(row))),
    min_size=COUNT,
    max_size=COUNT,
)


@settings(max_examples=60)
@given(st.lists(st.tuples(texts, rows_of_passages), min_size=1, max_size=3), st.integers(1, 6))
def test_drafts_are_those_of_the_search(requests: list[tuple[list[int], list[list[int]]]], tokens: int) -> None:
    columns = max(len(text) for text, _ in requests) + 2
    own = torch.tensor([text + [7] * (columns - len(text)) for text, _ in requests], dtype=torch.int32)
    lengths = torch.tensor([len(text) for text, _ in requests], dtype=torch.int32)
    passages = torch.tensor([[rows, CHANCES] for _, rows in requests], dtype=torch.int32)
    found, _, chances = draft(own, lengths, passages, OVERLAP, tokens)
    assert found.dtype == torch.int64
    expected = [drafted_by_search(text, rows, tokens) for text, rows in requests]
    assert list(zip(found.tolist(), chances.tolist(), strict=True)) == expected


def test_confidences_are_how_often_tokens_were_right_after_a_match_of_that_length() -> None:
    """A row's own last match counts, and the token after those that were verified; tokens behind a wrong one do not."""
    confidence, rows = MatchConfidence(3, 4, torch.device("cpu")), torch.tensor([2, 0])
    random, lengths, drafts = torch.Generator().manual_seed(0), torch.tensor([9, 9]), torch.tensor([[5, 6, 7, 8]] * 2)
    unknown = torch.full((2, 4), -1)
    for _ in range(3000):
        confidence.of(rows, lengths, torch.tensor([3, 0]), drafts, unknown)
        right = int((torch.rand(4, generator=random) < torch.tensor([0.9, 0.5, 0.8, 0.7])).long().cumprod(0).sum())
        sampled = min(right, 2) + 1  # the server verified two of four
        newest = drafts[0, sampled - 1] if right >= sampled else 0
        lengths = lengths + sampled
        confidence.observe(rows, lengths, torch.tensor([sampled] * 2), torch.tensor([newest] * 2))
        confidence.observe(rows, lengths + 1, torch.tensor([sampled] * 2), torch.tensor([0, 0]))  # of another text
    asked = torch.tensor([1, 2]), lengths, torch.tensor([3, 0]), drafts
    known, other = confidence.of(*asked, unknown).tolist()
    assert torch.allclose(torch.tensor(known[:3]), torch.tensor([0.9, 0.5, 0.8]), atol=0.08)
    assert abs(known[3] - 6 / 7) < 1e-6 and other == [0.0] * 4, "of what was never compared a rate is assumed"
    given = confidence.of(*asked, torch.full((2, 4), CERTAIN // 4)).tolist()
    assert given == [[0.25] * 4, [0.0] * 4], "what the search says comes first"
