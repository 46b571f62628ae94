"""Parses an answer as it arrives: separates reasoning and tool calls from its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentspec.backends.torch.text.tool_parser import OutputPiece, ToolCallParser, ToolFormat
from agentspec.text import partial_end
from agentspec.types import Delta, GenerateRequest

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


@dataclass(frozen=True, slots=True)
class OutputParserSpec:
    """Says how to parse the answers to one request."""

    expected: Expectation = "never"
    format: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    parallel: bool = True
    named: bool = False

    @classmethod
    def of(cls, request: GenerateRequest, format: ToolFormat | None, expected: Expectation) -> OutputParserSpec:
        called = format if request.tool_choice != "none" else None
        return cls(
            expected=expected if request.split_reasoning else "never",
            format=called if request.tools else None,
            names=frozenset(tool["function"]["name"] for tool in request.tools),
            parallel=request.parallel_tool_calls,
            named=request.tool_choice not in ("auto", "none", "required"),
        )

    def parser(self) -> OutputParser:
        """A new parser for one answer."""
        calls = (
            None if self.format is None else ToolCallParser(self.format, self.names, self.parallel and not self.named)
        )
        return OutputParser(self, ReasoningParser(self.expected), calls)


@dataclass(slots=True)
class OutputParser:
    """Turns the engine's deltas into the client's, without losing or repeating text."""

    spec: OutputParserSpec
    _reasoning: ReasoningParser
    _calls: ToolCallParser | None
    _called: bool = field(default=False)

    def parse(self, delta: Delta) -> Delta:
        """The same delta with its text split into text, reasoning and tool calls."""
        reasoning, text = self._reasoning.feed(delta.text)
        if delta.finish_reason is not None:
            rest = self._reasoning.finish()
            reasoning, text = reasoning + rest[0], text + rest[1]
        pieces: list[OutputPiece] = [text] if self._calls is None else self._calls.feed(text)
        if self._calls is not None and delta.finish_reason is not None:
            pieces += self._calls.finish()
        calls = [piece for piece in pieces if isinstance(piece, dict)]
        self._called = self._called or bool(calls)
        extra: dict[str, Any] = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
        if calls:
            extra["tool_calls"] = calls
        answer = "".join(piece for piece in pieces if isinstance(piece, str))
        finish = delta.finish_reason
        whole = self._called and self._calls is not None and not self._calls.cut  # by a stop string, for example
        if finish == "stop" and whole and not self.spec.named:
            finish = "tool_calls"  # for a named tool, OpenAI reports "stop"
        return replace(delta, text=answer, extra={**delta.extra, **extra}, finish_reason=finish)


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """How to read answers to a request: `decode` tokens with the marks that `parser()`, one for each answer, needs."""

    parser: Callable[[], OutputParser]
    decode: Callable[[Sequence[int]], str]
