"""Where the tokens of an answer came from, as local models report it to requests that ask for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RejectedDraft:
    """Drafted text that the model did not write, from the first token that differs on along its likeliest branch.
    `probability` is that token's, as in `TokenSource`.
    """

    text: str
    source: str
    probability: float


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where one token of an answer came from. `source` is one of `Source.NAMES`, None for the model's own draw.

    `probability` is the calibrated probability, before the model verified it, that the draft would be accepted up to
    here. `rejected` are the drafts for this place that were not. `forward` numbers the forwards of the answer from 0.
    """

    text: str
    source: str | None
    probability: float | None
    rejected: tuple[RejectedDraft, ...]
    forward: int


def source_object(token: TokenSource) -> dict[str, Any]:
    """A token and where it came from; what is not known of it is left out."""
    return {name: value for name, value in asdict(token).items() if value not in (None, ())}
