"""A step of thinking, which is a model's text up to a blank line, and a reader that finds its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from agentspec.text import partial_end

BOUNDARY = "\n\n"
Author = Literal["small", "base"]
Ending = Literal["boundary", "length", "closed", "stop"]
"""What ended a step: a blank line, the token limit, the mark that closes the thinking, or the model's own stop."""


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step. `text` ends with the blank line if one ended it, and never holds the closing mark.

    `token_ids` are those that the author generated, and decode exactly to `text`; empty if its backend gives none.
    `tokens` counts all tokens generated for the step, in `seconds`, after `prompt_tokens` (0: unknown).
    """

    text: str
    author: Author
    ending: Ending
    tokens: int = 0
    seconds: float = 0.0
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0

    @property
    def blank(self) -> bool:
        return not self.text.strip()

    def without(self, mark: str) -> Step:
        """This step without `mark` in its text."""
        if not mark or mark not in self.text:
            return self
        return replace(self, text=self.text.replace(mark, ""), token_ids=())


@dataclass(slots=True)
class StepReader:
    """Passes text on up to the end of the step, and holds back text that may be the start of an end mark.

    `ended` names the mark that the text contained, "boundary" or "closed"; None before that. The result does not
    depend on how the text was cut into pieces. With `across`, a blank line does not end the step.
    """

    closing: str
    across: bool = False
    ended: Literal["boundary", "closed"] | None = None
    text: str = ""
    rest: str = ""
    _held: str = field(default="", repr=False)

    def feed(self, piece: str) -> str:
        """Add `piece`, and return the text that now surely belongs to the step. Text after its end goes to `rest`."""
        if self.ended:
            self.rest += piece
            return ""
        window = self._held + piece
        found = [(at, mark) for mark in self.marks if (at := window.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self.ended = "boundary" if mark == BOUNDARY else "closed"
            end = at + len(mark)
            self.rest, self._held = window[end:], ""
            return self._pass(window[: end if mark == BOUNDARY else at])
        keep = max((partial_end(window, mark) for mark in self.marks), default=0)
        self._held = window[len(window) - keep :]
        return self._pass(window[: len(window) - keep])

    def finish(self) -> str:
        """Return the text that was held back. Call it when no more text will come."""
        held, self._held = self._held, ""
        return self._pass(held)

    @property
    def fed(self) -> str:
        """All text that `feed` received before the step ended."""
        return self.text + self._held

    @property
    def marks(self) -> tuple[str, ...]:
        """The strings that end the step."""
        marks = () if self.across else (BOUNDARY,)
        return (*marks, self.closing) if self.closing else marks

    def _pass(self, text: str) -> str:
        self.text += text
        return text
