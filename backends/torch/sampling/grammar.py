"""Grammars that constrain answers: a grammar compiled for a model's tokens, and its state along one answer.

llguidance computes masks, advances the state and rolls it back. The state depends on the answer's tokens alone, so
that the distribution at a node of a draft tree is the one that the grammar leaves after the drafted ancestors: a draft
that violates the grammar is never accepted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import llguidance
import numpy as np
import torch
from torch import Tensor

from agentspec.errors import EngineError, InvalidRequestError

KEPT = 64  # compiled grammars kept, since agents send the same schema again and again
BLANKS: Final = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})"}  # unlimited blanks would let a weak model ramble
COMBINATORS = ("allOf", "unevaluatedProperties", "dependentSchemas", "then", "not")
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples")


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe. The tokenizer's tables are built on first use (about a second)."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.end_ids = tuple(sorted(end_ids))
        self._tokenizer = tokenizer
        self._tables: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compile = lru_cache(KEPT)(self._compiled)

    @property
    def tables(self) -> llguidance.LLTokenizer:
        """The tokenizer's tables. Raises `InvalidRequestError` if this model's tokens cannot be constrained."""
        with self._lock:
            if self._tables is None:
                self._tables = self._built()
            return self._tables

    def compile(self, source: str, *, param: str) -> CompiledGrammar:
        """Compile `source`, in llguidance's notation. Raises `InvalidRequestError` naming `param` if it is invalid."""
        try:
            return self._compile(source)
        except ValueError as error:
            raise InvalidRequestError(f"the grammar of this request is refused: {error}", param=param) from None

    def symbol(self, text: str) -> str:
        """How a grammar must write `text`: as a token if it is one special token, else as a string literal."""
        token = self._tokenizer.get_vocab().get(text)
        special = token is not None and self.tables.is_special_token(token)
        return f"<[{token}]>" if special else lark_string(text)

    def _compiled(self, source: str) -> CompiledGrammar:
        matcher = llguidance.LLMatcher(self.tables, source, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().partition("\n<state>")[0][:2000])
        return CompiledGrammar(self, matcher)

    def _built(self) -> llguidance.LLTokenizer:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self.end_ids:
            raise InvalidRequestError(
                "this model's answers cannot be constrained: that needs a fast tokenizer and an end token",
                param="response_format",
            )
        size = max(self.vocab_size, len(self._tokenizer))
        return llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=list(self.end_ids))


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A compiled grammar, shared by all answers that must follow it."""

    owner: GrammarCompiler
    _matcher: llguidance.LLMatcher

    def start(self) -> GrammarMatcher:
        """The state at the start of an answer, which has no tokens yet."""
        return GrammarMatcher(self.owner, self._matcher.deep_copy())


class GrammarMatcher:
    """The grammar's state after the answer so far. Not thread-safe.

    An end token is allowed once the text satisfies the grammar, and forced when no other token is allowed.
    """

    def __init__(self, owner: GrammarCompiler, matcher: llguidance.LLMatcher) -> None:
        self._owner = owner
        self._matcher = matcher
        self._bits = np.zeros((max(owner.vocab_size, owner.tables.vocab_size) + 31) // 32, dtype=np.int32)

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; far cheaper than `mask`."""
        return self._follows(self._matcher, token)

    def mask(self) -> Tensor:
        """Which tokens may come next, as bool [vocab] with at least one True."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._owner.vocab_size]
        return torch.from_numpy(bits.view(np.bool_))

    def advance(self, token: int) -> None:
        """Append `token`, which must be allowed, to the answer."""
        if token not in self._owner.end_ids:
            self._matcher.consume_token(token)
            self._check()

    def forced(self) -> list[int]:
        """The tokens of the text that must follow, as the tokenizer would spell it; an end token if only the end can
        follow; empty if the grammar leaves a choice.
        """
        if self._matcher.is_stopped():
            return [self._owner.end_ids[-1]]
        return list(self._matcher.compute_ff_tokens())

    def admitted(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The nodes of a draft tree, ascending, that the grammar allows after their ancestors. Keeps the state."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        admitted: list[int] = []
        self._visit(self._matcher.deep_copy(), -1, children, tokens, admitted)
        return sorted(admitted)

    def _visit(
        self,
        matcher: llguidance.LLMatcher,
        above: int,
        children: dict[int, list[int]],
        tokens: Sequence[int],
        admitted: list[int],
    ) -> None:
        for node in children.get(above, ()):
            token = tokens[node]
            if not (0 <= token < self._owner.vocab_size and self._follows(matcher, token)):
                continue
            admitted.append(node)
            if node in children and token not in self._owner.end_ids and matcher.consume_token(token):
                self._visit(matcher, node, children, tokens, admitted)
                matcher.rollback(1)

    def _follows(self, matcher: llguidance.LLMatcher, token: int) -> bool:
        if token in self._owner.end_ids:
            return matcher.is_accepting()
        return not matcher.is_stopped() and matcher.validate_tokens([token]) == 1

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar cannot follow this answer: {self._matcher.get_error()[:200]}")


def lark_string(text: str) -> str:
    """`text` as a string literal in Lark's notation."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` as the grammar uses it: limits blanks, and forbids unlisted properties unless it has a rule for them.

    A model that may add properties rarely stops. A schema with keywords that combine several descriptions of one
    object (`COMBINATORS`) keeps its rules for properties.
    """
    written = json.dumps(schema)
    combined = any(f'"{word}":' in written for word in COMBINATORS)
    return {**(schema if combined else _closed(schema)), "x-guidance": BLANKS}


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _inner(key, value) for key, value in schema.items()}
    lists = isinstance(schema.get("properties"), Mapping) and schema.get("type", "object") == "object"
    stated = {"additionalProperties", "patternProperties"} & schema.keys()
    return {**inner, "additionalProperties": False} if lists and not stated else inner


def _inner(key: str, value: Any) -> Any:
    if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: _closed(one) for name, one in value.items()}
    return value if key in _VALUES else _closed(value)
