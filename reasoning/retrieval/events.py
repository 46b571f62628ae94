"""The events of an answer that is generated with retrieval."""

from __future__ import annotations

from dataclasses import dataclass

from agentspec.backends.local_abilities import AnswerReader
from agentspec.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class AnswerBegan:
    """The prompt is read. `reader` tells the thoughts and tool calls in the text that follows; None if it is plain."""

    reader: AnswerReader | None


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The answer waited for a search; `document` is the id of the best document, None if the search found none."""

    document: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Speculated:
    """A round began after `position` tokens of the answer, with a guessed document that is not verified yet."""

    document: str | None
    position: int


@dataclass(frozen=True, slots=True)
class Verified:
    """A batch of `queries` guessed documents was verified: the first `matched` of them were right.

    `changed`: the version of the knowledge base has changed since the documents were guessed.
    """

    queries: int
    matched: int
    seconds: float
    changed: bool = False


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The answer was cut to `position` tokens; it goes on with `document`. Dropped: `rounds`, with `tokens` in all."""

    position: int
    document: str | None
    rounds: int
    tokens: int


@dataclass(frozen=True, slots=True)
class VerifiedText:
    """The text and tokens of a verified round; text that may be the start of a stop string is held back."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    document: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The answer is complete. `prompt_tokens` counts the tokens of the question, without documents."""

    finish: FinishReason
    prompt_tokens: int = 0
    stop_reason: str | None = None


Event = AnswerBegan | Retrieved | Speculated | Verified | RolledBack | VerifiedText | AnswerEnded
