"""Passages: the likeliest continuations of a request's known text, as rows of one size for the device."""

from __future__ import annotations

from typing import NamedTuple

NO_TOKEN = -1
_ROWS, _OVERLAP = 4, 16
STEPS_BEHIND = 3
"""Steps whose tokens were unknown when the passages that are used were searched for, at most: with asynchronous
scheduling one is computed while the next is being prepared, and the search takes less than a third."""
_STEPS_MORE = 2  # until the next search, where the text goes on like a passage


class PassageShape(NamedTuple):
    """The size of a request's passages: `rows` rows of `width` tokens, the first `overlap` of them known text.

    The overlap lets the device find the place of a continuation by the tokens before it. A search follows when fewer
    than `least` tokens are left.
    """

    rows: int
    overlap: int
    width: int
    least: int

    @property
    def ahead(self) -> int:
        """Tokens of a continuation, and nodes of the draft tree whose paths are the passages: half as many more took
        half as long again, for 0.2 % more tokens a step.
        """
        return self.width - self.overlap


def shape_for(draft_tokens: int) -> PassageShape:
    """Passages long enough for a chain of `draft_tokens` after all steps that the host does not know were accepted."""
    least = STEPS_BEHIND * (draft_tokens + 1) + draft_tokens
    return PassageShape(_ROWS, _OVERLAP, _OVERLAP + least + _STEPS_MORE * (draft_tokens + 1), least)
