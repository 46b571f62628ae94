"""The form that a request wants of its answer: its grammar, the engine's constraints, and how to parse the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentspec.backends.threads import TenantThreads
from agentspec.backends.torch.grammars.grammar import CompiledGrammar, GrammarCompiler, is_large
from agentspec.backends.torch.sampling.constraints import ConstraintSpec, ThinkingLimit
from agentspec.backends.torch.text.answer_grammar import (
    MARKS,
    THINK,
    TOOLS,
    Expectation,
    GrammarSource,
    Marks,
    first_mark,
    grammar_of,
)
from agentspec.backends.torch.text.channels import HARMONY, HarmonyParser, TemplateParser
from agentspec.backends.torch.text.chat_template import template_of
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.backends.torch.text.tool_markup import MarkupFormat, MarkupParser, Schemas
from agentspec.backends.torch.text.tool_parser import (
    OutputPiece,
    ToolCallParser,
    ToolFormat,
    format_of,
    joined,
    tool_format,
)
from agentspec.errors import InvalidRequestError
from agentspec.text import partial_end
from agentspec.types import Delta, GenerateRequest


@dataclass(slots=True)
class ReasoningParser:
    """Splits reasoning from the answer. The result does not depend on how the text was cut into pieces.

    Reasoning begins with the answer, or with a first mark that only blanks precede, and ends with the second.
    """

    expected: Expectation
    marks: Marks = THINK
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
        if begun.startswith(self.marks[0]):
            self._held, self._thinking = begun.removeprefix(self.marks[0]), True
        elif not self.marks[0].startswith(begun):
            self._over, self._strip = True, False

    def _think(self) -> str:
        end = self.marks[1]
        at = self._held.find(end)
        if at < 0:
            body = self._held[
                : len(self._held) - partial_end(self._held, end)
            ].rstrip()  # hold back blanks that may precede `</think>`
            return self._taken(len(body))
        reasoning = self._taken(at).rstrip()
        self._held = self._held.lstrip().removeprefix(end)
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
    marks: Marks = THINK
    format: MarkupFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    parallel: bool = True
    named: bool = False
    template: Callable[[], Any] | None = None  # makes transformers' parser by the checkpoint's `response_template`
    split: bool = True

    @classmethod
    def of(
        cls, request: GenerateRequest, format: MarkupFormat | None, expected: Expectation, marks: Marks = THINK
    ) -> OutputParserSpec:
        return cls(
            expected=expected if request.split_reasoning else "never",
            marks=marks,
            format=format,
            schemas={tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.tools},
            parallel=request.parallel_tool_calls,
            named=request.tool_choice not in ("auto", "none", "required"),
            split=request.split_reasoning,
        )

    def parser(self) -> OutputParser:
        parallel = self.parallel and not self.named
        if self.template is not None or self.format is HARMONY:
            calls = MarkupParser(HARMONY, self.schemas, parallel)
            channels = HarmonyParser(calls) if self.template is None else TemplateParser(self.template(), calls)
            return OutputParser(self, channels, None)
        found: ToolCallParser | MarkupParser | None = None
        if isinstance(self.format, ToolFormat):
            found = ToolCallParser(self.format, frozenset(self.schemas), parallel)
        elif self.format is not None:
            found = MarkupParser(self.format, self.schemas, parallel)
        return OutputParser(self, ReasoningParser(self.expected, self.marks), found)


@dataclass(slots=True)
class OutputParser:
    """Turns the engine's deltas into the client's, without losing or repeating text."""

    spec: OutputParserSpec
    _reasoning: ReasoningParser | HarmonyParser | TemplateParser
    _calls: ToolCallParser | MarkupParser | None
    _called: bool = field(default=False)

    def parse(self, delta: Delta) -> Delta:
        """The same delta with its text split into text, reasoning and tool calls."""
        ended = delta.finish_reason is not None
        reasoning, text = self._reasoning.feed(delta.text)
        rest = self._reasoning.finish() if ended else ("", "")
        reasoning, pieces = reasoning + rest[0], joined([*_pieces(text), *_pieces(rest[1])])
        if self._calls is not None:
            pieces = self._calls.feed("".join(map(str, pieces)))
            pieces += self._calls.finish() if ended else []
        if not self.spec.split and self._calls is None and reasoning:
            reasoning, pieces = "", [reasoning, *pieces]
        calls = [piece for piece in pieces if isinstance(piece, dict)]
        self._called = self._called or bool(calls)
        extra: dict[str, Any] = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
        if calls:
            extra["tool_calls"] = calls
        answer = "".join(piece for piece in pieces if isinstance(piece, str))
        finish = delta.finish_reason
        cut = getattr(self._calls or self._reasoning, "cut", False)  # within a call, by a stop string for example
        whole = self._called and not cut
        if finish == "stop" and whole and not self.spec.named:
            finish = "tool_calls"  # for a named tool, OpenAI reports "stop"
        return replace(delta, text=answer, extra={**delta.extra, **extra}, finish_reason=finish)


def _pieces(parsed: str | list[OutputPiece]) -> list[OutputPiece]:
    return [parsed] if isinstance(parsed, str) else parsed


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One request's grammar and bad words for the engine, and how to parse its answers."""

    parser_spec: OutputParserSpec
    source: GrammarSource | None
    bad_words: tuple[tuple[int, ...], ...]
    shown: frozenset[int]
    thinking: ThinkingLimit | None = None

    def constraints(self, choices: int, grammar: CompiledGrammar | None) -> list[ConstraintSpec]:
        common = (grammar, self.bad_words)
        return [ConstraintSpec(*common, choice, self.shown, self.thinking) for choice in range(choices)]


class StructuredOutputBuilder:
    """Builds the `StructuredOutput` of one model's requests. Thread-safe."""

    def __init__(self, tokenizer: TokenizerAdapter, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer.tokenizer, vocab_size, end_ids)
        self._threads = TenantThreads(1, "agentspec-grammar")
        self._vocabulary: dict[str, int] = getattr(tokenizer.tokenizer, "get_vocab", dict)()
        template = template_of(tokenizer.tokenizer)
        known = [marks for marks in MARKS if marks[1] in self._vocabulary or marks[1] in template]
        self._thinks, self._marks = bool(known), next(iter(known), THINK)
        self._has_channels = format_of(template) is HARMONY
        self._response_template = getattr(tokenizer.tokenizer, "response_template", None)
        self.finds_marks = bool(  # in any chat's answer, without tools
            self._thinks or THINK[0] in self._vocabulary or self._has_channels or self._response_template
        )

    def build(self, request: GenerateRequest, prompt: str) -> StructuredOutput:
        """Build it for `request`, rendered as `prompt`. Raises `InvalidRequestError`."""
        parser_spec, shown = self.reading(request, prompt)
        format, expected = parser_spec.format, self._expected(request, prompt)
        source, form = None, request.sampling.structured_outputs
        if form or format:
            try:
                source = grammar_of(request, format, expected, self._grammars.symbol, self._marks)
            except InvalidRequestError as error:  # of a tokenizer that cannot be constrained by anything
                error.param = error.param or (form.param if form else TOOLS)
                raise
        return StructuredOutput(
            parser_spec=parser_spec,
            source=source,
            bad_words=self._bad_words(request.sampling.bad_words),
            shown=shown,
            thinking=self._thinking_limit(request.thinking_budget, expected),
        )

    def reading(self, request: GenerateRequest, prompt: str) -> tuple[OutputParserSpec, frozenset[int]]:
        """How to parse answers to `request`, rendered as a text that ends in `prompt`, and the special tokens that are
        marks to the parser.
        """
        tokenizer, chat = self._tokenizer.tokenizer, request.messages is not None
        called = bool(request.tools) and request.tool_choice != "none"
        template = self._response_template if chat else None
        format: MarkupFormat | None = HARMONY if chat and self._has_channels else None
        if called:
            format = tool_format(tokenizer, required=template is None or request.tool_choice != "auto")
        spec = OutputParserSpec.of(request, format, self._expected(request, prompt), self._marks)
        if template and format is None:  # of formats known here, calls are streamed and constrained
            tools = [dict(tool) for tool in request.tools] if called else None
            make = partial(tokenizer.get_response_parser, prefix=prompt, tools=tools)
            spec = replace(spec, template=make)
        return spec, self._shown(format, str(template or "")) if chat else frozenset()

    async def compiled(self, tenant: str, source: GrammarSource) -> CompiledGrammar:
        """The compiled grammar. Tenants take turns with large ones, which hold up no other request.

        Raises what `GrammarCompiler.compile` raises, and `ShuttingDownError`.
        """
        known = self._grammars.known(source.text, param=source.param, tenant=tenant)
        if known is not None:
            return known
        if is_large(source.text):
            return await self._threads.run(tenant, self.compile, tenant, source)
        return await asyncio.to_thread(self.compile, tenant, source)

    def compile(self, tenant: str, source: GrammarSource) -> CompiledGrammar:
        return self._grammars.compile(source.text, param=source.param, tenant=tenant)

    def close(self) -> None:
        """End the thread and the process that try out large grammars."""
        self._threads.close()
        self._grammars.close()

    def _expected(self, request: GenerateRequest, prompt: str) -> Expectation:
        """Whether thoughts come first; `OutputParserSpec.expected` says whether they are split off."""
        end = prompt.rstrip()
        if request.messages is None or not self._thinks or end.endswith(self._marks[1]):
            return "never"
        return "begun" if end.endswith(self._marks[0].rstrip()) else "maybe"

    def _shown(self, format: MarkupFormat | None, template: str) -> frozenset[int]:
        """The special tokens among the strings that the answer's parser looks for, or a response template names."""
        named = (self._tokenizer.spell(token) for token in self._tokenizer.special_ids) if template else ()
        sought = {text for text in named if text in template.replace("\\", "")}
        sought |= {first_mark(self._marks), self._marks[1], *(format.markers if format else ())}
        sought &= self._vocabulary.keys()
        tokens = [self._vocabulary[text] for text in sought]
        return frozenset(token for token in tokens if not self._tokenizer.decode([token]))

    def _thinking_limit(self, tokens: int | None, expected: Expectation) -> ThinkingLimit | None:
        """The limit of the request's thoughts, for models whose mark of their end is one token."""
        end = self._vocabulary.get(self._marks[1])
        if tokens is None or end is None or end >= self._vocab_size or expected == "never":
            return None
        return ThinkingLimit(tokens, end, self._vocabulary.get(first_mark(self._marks)), begun=expected == "begun")

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word alone and, if they begin with another token, of the word after a blank (as vLLM)."""
        found: list[tuple[int, ...]] = []
        for word in words:
            plain = tuple(self._tokenizer.encode(word))
            spaced = tuple(self._tokenizer.encode(" " + word.lstrip()))
            found.append(plain)
            if plain[:1] != spaced[:1] and len(spaced) == len(plain):
                found.append(spaced)
        if any(not sequence or max(sequence) >= self._vocab_size for sequence in found):
            raise InvalidRequestError("bad_words holds a word that this model has no tokens for", param="bad_words")
        return tuple(found)
