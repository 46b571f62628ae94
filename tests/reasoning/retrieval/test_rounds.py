"""The text of an answer that grows round by round, to its last token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agentspec.reasoning.retrieval.rounds import PartialAnswer, RoundOutput

pytestmark = pytest.mark.anyio


class Bytes:
    """Every token is a byte."""

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("tokens", "told", "text"),
    [
        (b"a\n\n", "a\n", "a\n"),  # the last one ended the answer, and reads like the end of the text
        (b"a\n\n", "a\n\n", "a\n\n"),  # a server that leaves the token out by which it ended
        (b"a\n", "a\n", "a\n"),
        (b"a!", "a", "a"),
        (b"!", "", ""),
        (b"", "", ""),
    ],
)
async def test_a_token_that_ends_the_answer_adds_no_text(tokens: bytes, told: str, text: str) -> None:
    before = await PartialAnswer.behind(b"Q", Bytes())
    answer = await before.extended(RoundOutput(tuple(tokens), told, "stop"), Bytes(), 64)
    assert (answer.text, answer.finish) == (text, "stop")
