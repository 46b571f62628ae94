"""What happens while an answer is generated with retrieval, as it happens."""

from __future__ import annotations

from dataclasses import dataclass

from agentspec.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The knowledge base was asked and waited for; `document` is the id of the best one, None where it has none."""

    document: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Speculated:
    """A round was begun behind `position` tokens of answer with a document that the knowledge base has yet to name."""

    document: str | None
    position: int


@dataclass(frozen=True, slots=True)
class Verified:
    """One batch of queries was answered: the first `matched` of its `queries` speculated documents are the true ones.

    `changed`: the knowledge base is another version than the one that was speculated on.
    """

    queries: int
    matched: int
    seconds: float
    changed: bool = False


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The answer is back at `position` tokens and goes on with `document`; `rounds` rounds of `tokens` are gone."""

    position: int
    document: str | None
    rounds: int
    tokens: int


@dataclass(frozen=True, slots=True)
class VerifiedText:
    """Verified text and the tokens of a verified round; what may yet become a stop string is held back."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    document: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The answer is whole. `prompt_tokens` are the question's, without documents."""

    finish: FinishReason
    prompt_tokens: int = 0


Event = Retrieved | Speculated | Verified | RolledBack | VerifiedText | AnswerEnded
