"""Reasoning before the answer: tells whether to expect it, and splits it off as the answer arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentspec.text import partial_end

BEGIN, END = "<think>", "</think>"
Expectation = Literal["never", "maybe", "begun"]


def expectation(prompt: str, *, thinks: bool) -> Expectation:
    """Whether the answer to the rendered `prompt` begins with reasoning, for a model that `thinks` at all."""
    end = prompt.rstrip()
    if not thinks or end.endswith(END):
        return "never"
    return "begun" if end.endswith(BEGIN) else "maybe"


@dataclass(slots=True)
class ReasoningParser:
    """Splits reasoning from the answer. The result does not depend on how the text was cut into pieces.

    Reasoning begins with the answer, or with a `<think>` that only blanks precede, and ends with `</think>`.
    """

    expected: Expectation
    _held: str = ""
    _thinking: bool = False
    _over: bool = False
    _strip: bool = True  # drop blanks at the beginning of the reasoning and of the answer after it

    def __post_init__(self) -> None:
        self._thinking, self._over = self.expected == "begun", self.expected == "never"
        self._strip = not self._over

    def feed(self, piece: str) -> tuple[str, str]:
        """The reasoning and the text that `piece` adds."""
        self._held += piece
        reasoning = ""
        if not self._thinking and not self._over:
            self._begin()
        if self._thinking:
            reasoning = self._think()
        return reasoning, self._taken(len(self._held)) if self._over else ""

    def finish(self) -> tuple[str, str]:
        """The reasoning and text that were held back; called when no more text will come."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._thinking else ("", held)

    def _begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(BEGIN):
            self._held, self._thinking = begun.removeprefix(BEGIN), True
        elif not BEGIN.startswith(begun):
            self._over, self._strip = True, False

    def _think(self) -> str:
        at = self._held.find(END)
        if at < 0:
            kept = partial_end(self._held, END)
            body = self._held[: len(self._held) - kept].rstrip()  # hold back blanks that may precede `</think>`
            return self._taken(len(body))
        reasoning = self._taken(at).rstrip()
        self._held = self._held.lstrip().removeprefix(END)
        self._thinking, self._over, self._strip = False, True, True
        return reasoning

    def _taken(self, count: int) -> str:
        """Take the first `count` held characters, without the blanks at the beginning of a part."""
        taken, self._held = self._held[:count], self._held[count:]
        if self._strip:
            taken = taken.lstrip()
            self._strip = not taken
        return taken
