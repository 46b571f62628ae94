"""Compiles grammars for one model: small ones at once, larger ones after another process has survived them."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

from agentspec.backends.heap import give_back
from agentspec.backends.torch.grammars.helper import CompileHelper
from agentspec.backends.torch.grammars.matcher import CompiledGrammar, TokenTable, reason
from agentspec.backends.torch.grammars.notation import lark_string
from agentspec.backends.torch.grammars.worker import STACK, built_tokenizer, on_stack
from agentspec.errors import InvalidRequestError

KEPT: Final = 48  # compiled grammars kept, since agents send the same schema again and again
KEPT_BYTES: Final = 256 << 20  # with all that they may learn from answers
TRIED: Final = 1024  # large grammars that another process has survived
REFUSED: Final = 256  # reasons of refusals kept
SMALL: Final = 20_000  # characters
TRIM_BYTES: Final = 64 << 20  # of grammars dropped, after which the memory is given back to the system
# Expressions that must hold at once, and counted groups in counted groups, take much of both however short they are.
_COSTLY: Final = re.compile(r"&|\)\s*\{\s*\d.*\)\s*\{\s*\d", re.DOTALL)


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe. The tokenizer's tables are built on first use (about a second)."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.end_ids = tuple(sorted(end_ids))
        self._tokenizer = tokenizer
        self._table: TokenTable | None = None
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._dropped = 0  # bytes since memory was given back
        self._tried: OrderedDict[bytes, int] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._helper = CompileHelper(self._setup)

    @property
    def table(self) -> TokenTable:
        """The model's tokens. Raises `InvalidRequestError` if this model's tokens cannot be constrained."""
        with self._building:
            if self._table is None:
                setup = self._setup()
                tokenizer = built_tokenizer(setup["tokenizer"], setup["vocab_size"], setup["end_ids"])
                self._table = TokenTable(self.vocab_size, self.end_ids, tokenizer)
            return self._table

    def compile(self, source: str, *, param: str) -> CompiledGrammar:
        """Compile `source`, in llguidance's notation; blocks, for a large one for seconds.

        Raises `InvalidRequestError` naming `param` for a grammar that is invalid or beyond the limits, and
        `EngineError` if no process can try out a large one.
        """
        key = _key(source, param)
        with self._lock:
            if key in self._refused:
                raise InvalidRequestError(self._refused[key], param=param)
            kept = self._kept.get(key)
        if kept is not None and not kept.worn:
            self._keep(key, kept)  # again: answers may have let it, or others, grow
            return kept
        try:
            small = _small(source)
            size = len(source) if small else self._tried_out(key, source)
            grammar = on_stack(STACK, lambda: self._compiled(source, param, size, small))
        except ValueError as error:
            message = f"the grammar of this request is refused: {reason(str(error))}"
            self._refuse(key, message)
            raise InvalidRequestError(message, param=param) from None
        except InvalidRequestError as error:
            error.param = error.param or param
            self._refuse(key, error.message)
            raise
        self._keep(key, grammar)
        return grammar

    def waits(self, source: str, *, param: str) -> bool:
        """Whether `compile` would wait for another process: for a large grammar that it does not know yet."""
        key = _key(source, param)
        with self._lock:
            kept = self._kept.get(key)
            known = key in self._refused or (kept is not None and not kept.worn)
        return not known and not _small(source)

    def symbol(self, text: str) -> str:
        """How a grammar must write `text`: as a token if it is one special token, else as a string literal."""
        token = self._tokenizer.get_vocab().get(text)
        special = token is not None and self.table.tokenizer.is_special_token(token)
        return f"<[{token}]>" if special else lark_string(text)

    def close(self) -> None:
        """End the other process."""
        self._helper.close()

    def _tried_out(self, key: bytes, source: str) -> int:
        """The bytes that a large grammar takes, which another process has survived, now or earlier."""
        with self._lock:
            size = self._tried.get(key)
        if size is None:
            size = self._helper.try_out(source)
        with self._lock:
            self._tried[key] = size
            self._tried.move_to_end(key)
            while len(self._tried) > TRIED:
                self._tried.popitem(last=False)
        return size

    def _compiled(self, source: str, param: str, size: int, small: bool) -> CompiledGrammar:
        grammar = CompiledGrammar(self.table, source, param, size=size, small=small)
        grammar.start().mask()  # a grammar that allows no first token is refused now
        return grammar

    def _keep(self, key: bytes, grammar: CompiledGrammar) -> None:
        with self._lock:
            self._kept[key] = grammar
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT or sum(one.nbytes for one in self._kept.values()) > KEPT_BYTES:
                self._dropped += self._kept.popitem(last=False)[1].nbytes
            trim = self._dropped > TRIM_BYTES
            self._dropped = 0 if trim else self._dropped
        if trim:
            give_back()

    def _refuse(self, key: bytes, message: str) -> None:
        with self._lock:
            self._refused[key] = message
            while len(self._refused) > REFUSED:
                self._refused.popitem(last=False)

    def _setup(self) -> dict[str, Any]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self.end_ids:
            raise InvalidRequestError(
                "this model's answers cannot be constrained: that needs a fast tokenizer and an end token"
            )
        size = max(self.vocab_size, len(self._tokenizer))
        return {"tokenizer": backend.to_str(), "vocab_size": size, "end_ids": list(self.end_ids)}


def _small(source: str) -> bool:
    """Whether a grammar is compiled at once: llguidance's own limits end it before it takes much time or memory."""
    return len(source) <= SMALL and not _COSTLY.search(source)


def _key(source: str, param: str) -> bytes:
    return hashlib.sha256(f"{param}\0{source}".encode(errors="surrogatepass")).digest()
