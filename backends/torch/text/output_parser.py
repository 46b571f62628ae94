"""Parses an answer as it arrives: separates reasoning and tool calls from its text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.backends.torch.text.reasoning_parser import Expectation, ReasoningParser
from agentspec.backends.torch.text.tool_parser import OutputPiece, ToolCallParser, ToolFormat
from agentspec.types import Delta, GenerateRequest


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
