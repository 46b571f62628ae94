"""The form that a request wants of its answer: the engine's constraints, and how to parse the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.backends.tenant_threads import TenantThreads
from agentspec.backends.torch.grammars.compiler import GrammarCompiler
from agentspec.backends.torch.grammars.matcher import CompiledGrammar
from agentspec.backends.torch.sampling.constraints import ConstraintSpec, ThinkingLimit
from agentspec.backends.torch.text.chat_template import template_of, tool_format
from agentspec.backends.torch.text.grammar_builder import TOOLS, GrammarSource, grammar_of
from agentspec.backends.torch.text.output_parser import OutputParserSpec
from agentspec.backends.torch.text.reasoning_parser import BEGIN, END, Expectation, expectation
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.backends.torch.text.tool_parser import ToolFormat
from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One request's grammar and bad words for the engine, and how to parse its answers."""

    parser_spec: OutputParserSpec
    grammar: CompiledGrammar | None
    bad_words: tuple[tuple[int, ...], ...]
    shown: frozenset[int]
    thinking: ThinkingLimit | None = None

    def constraints(self, choices: int) -> list[ConstraintSpec]:
        """The constraints of each choice."""
        common = (self.grammar, self.bad_words)
        return [ConstraintSpec(*common, choice, self.shown, self.thinking) for choice in range(choices)]


class LargeGrammarError(Exception):
    """Building this output would wait for another process that tries out its grammar, `source`."""

    def __init__(self, source: GrammarSource) -> None:
        super().__init__("large grammar")
        self.source = source


class StructuredOutputBuilder:
    """Builds the `StructuredOutput` of one model's requests. Thread-safe."""

    def __init__(self, tokenizer: TokenizerAdapter, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer.tokenizer, vocab_size, end_ids)
        self._threads = TenantThreads(1, "agentspec-grammar")
        self._vocabulary = _vocabulary(tokenizer)
        self._thinks = END in self._vocabulary or END in template_of(tokenizer.tokenizer)

    def build(
        self,
        request: GenerateRequest,
        prompt: str,
        *,
        may_wait: bool = True,
        compiled: CompiledGrammar | None = None,
    ) -> StructuredOutput:
        """Build it for `request`, whose rendered prompt is `prompt`. Raises `InvalidRequestError`, and
        `LargeGrammarError` instead of waiting unless it `may_wait` or its grammar is `compiled` already.
        """
        chat = request.messages is not None
        parser_spec, shown = self.reading(request, prompt)
        format, expected = parser_spec.format, self._expected(request, prompt)
        try:
            source = grammar_of(request, format, expected, self._grammars.symbol)
        except InvalidRequestError as error:  # of a tokenizer that cannot be constrained by anything
            form = request.sampling.structured_outputs
            error.param = error.param or (form.param if form else TOOLS)
            raise
        return StructuredOutput(
            parser_spec=parser_spec,
            grammar=None if source is None else compiled or self._compiled(source, may_wait),
            bad_words=self._bad_words(request.sampling.bad_words),
            shown=shown,
            thinking=self._thinking_limit(request.thinking_budget, expected) if chat else None,
        )

    def reading(self, request: GenerateRequest, prompt: str) -> tuple[OutputParserSpec, frozenset[int]]:
        """How to parse answers to `request`, whose rendered prompt ends in `prompt`, and the special tokens that are
        marks to the parser.
        """
        called = bool(request.tools) and request.tool_choice != "none"
        format = tool_format(self._tokenizer.tokenizer) if called else None
        spec = OutputParserSpec.of(request, format, self._expected(request, prompt))
        return spec, frozenset() if request.messages is None else self._shown(format, BEGIN, END)

    async def compiled_in_turn(self, tenant: str, source: GrammarSource) -> CompiledGrammar:
        """The compiled grammar, for which tenants take turns. Raises what `GrammarCompiler.compile` raises, and
        `ShuttingDownError`.
        """
        return await self._threads.run(tenant, self._compile, source)

    def close(self) -> None:
        """End the thread and the process that try out large grammars."""
        self._threads.close()
        self._grammars.close()

    def _expected(self, request: GenerateRequest, prompt: str) -> Expectation:
        """Whether thoughts come first; `OutputParserSpec.expected` says whether they are split off."""
        return expectation(prompt, thinks=request.messages is not None and self._thinks)

    def _compiled(self, source: GrammarSource, may_wait: bool) -> CompiledGrammar:
        if not may_wait and self._grammars.waits(source.text, param=source.param):
            raise LargeGrammarError(source)
        return self._compile(source)

    def _compile(self, source: GrammarSource) -> CompiledGrammar:
        return self._grammars.compile(source.text, param=source.param)

    def _shown(self, format: ToolFormat | None, *markers: str) -> frozenset[int]:
        """The special tokens among the strings that the answer's parser looks for."""
        sought = {*markers, *(format.markers if format else ())} & self._vocabulary.keys()
        return frozenset(
            self._vocabulary[text] for text in sought if not self._tokenizer.decode([self._vocabulary[text]])
        )

    def _thinking_limit(self, tokens: int | None, expected: Expectation) -> ThinkingLimit | None:
        """The limit of the request's thoughts, for models whose mark of their end is one token."""
        end = self._vocabulary.get(END)
        if tokens is None or end is None or end >= self._vocab_size or expected == "never":
            return None
        return ThinkingLimit(tokens, end, self._vocabulary.get(BEGIN), begun=expected == "begun")

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


def _vocabulary(tokenizer: TokenizerAdapter) -> dict[str, int]:
    known = getattr(tokenizer.tokenizer, "get_vocab", dict)
    return dict(known())
