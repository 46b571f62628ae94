"""Grammars compiled for one model: small ones at once, larger ones after another process has survived them.

llguidance computes masks, advances the state and rolls it back. The state depends on the answer's tokens alone, so
that the distribution at a node of a draft tree is the one that the grammar leaves after the drafted ancestors: a draft
that violates the grammar is never accepted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import llguidance
import numpy as np
import torch
from torch import Tensor

from agentspec.backends.torch.grammars import worker
from agentspec.backends.torch.grammars.notation import lark_string
from agentspec.backends.torch.grammars.worker import (
    CPU_SECONDS,
    STACK,
    STEP_SECONDS,
    built_tokenizer,
    compiled,
    on_stack,
)
from agentspec.errors import EngineError, InvalidRequestError, OverloadedError, ShuttingDownError
from agentspec.types import DEFAULT_TENANT

logger = logging.getLogger(__name__)

T = TypeVar("T")
TIMED_MASKS: Final = 48  # after which the time that they took is judged
QUICK_SECONDS: Final = 0.05  # a grammar that takes longer to compile is not compiled again between two steps
AGAIN_SECONDS: Final = 5.0  # until such a grammar is compiled for the next request, for Retry-After


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The tokens of a grammar: `vocab_size` of the model, those that end an answer, and their texts."""

    vocab_size: int
    end_ids: tuple[int, ...]
    tokenizer: llguidance.LLTokenizer


class CompiledGrammar:
    """A compiled grammar, shared by a tenant's answers in one form. `param` is the request's field that asked for it.

    Its answers share a lexer, which learns from them up to a limit, and fails for all of them once it failed for one:
    the grammar is then `broken`. Each answer goes on with a lexer of its own if the grammar is `quick` to compile.
    """

    def __init__(self, table: TokenTable, source: str, param: str) -> None:
        started = time.thread_time()
        self.table = table
        self.param = param
        self.broken = False
        self._source = source
        self._matcher = compiled(table.tokenizer, source)
        self.quick = time.thread_time() - started <= QUICK_SECONDS

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self, self._matcher.deep_copy())

    def own(self) -> llguidance.LLMatcher:
        """The grammar with a lexer for one answer alone."""
        return on_stack(STACK, lambda: compiled(self.table.tokenizer, self._source))


class GrammarMatcher:
    """The grammar's state after the answer so far. Not thread-safe.

    An end token is allowed once the text satisfies the grammar, and forced when no other token is allowed. All methods
    raise `InvalidRequestError` when a step is beyond the limits of time and memory, or when no text can go on, and
    `OverloadedError` when another answer broke a lexer that takes long to compile again.
    """

    def __init__(self, grammar: CompiledGrammar, matcher: llguidance.LLMatcher) -> None:
        self._grammar = grammar
        self._table = table = grammar.table
        self._matcher = matcher
        self._bits = np.zeros((max(table.vocab_size, table.tokenizer.vocab_size) + 31) // 32, dtype=np.int32)
        self._forced: list[int] = []
        self._tokens: list[int] = []
        self._alone = False  # whether the lexer is this answer's own
        self._drafts = True
        self._masks, self._seconds = 0, 0.0  # processor time of this thread for the latest masks

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; far cheaper than `mask`."""
        return self._try(lambda matcher: self._follows(matcher, token))

    def mask(self) -> Tensor:
        """Which tokens may come next, as bool [vocab] with at least one True."""
        started = time.thread_time()
        self._try(lambda matcher: matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes))
        self._count_mask(time.thread_time() - started)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._table.vocab_size]
        if not bits.any():
            raise self._failure("no token of this model can continue it")
        return torch.from_numpy(bits.view(np.bool_))

    def _count_mask(self, seconds: float) -> None:
        """Raises the error with which the answer ends if masks take so long that other answers wait for them."""
        self._masks, self._seconds = self._masks + 1, self._seconds + seconds
        if self._masks < TIMED_MASKS:
            return
        each, self._masks, self._seconds = self._seconds / self._masks, 0, 0.0
        if each > STEP_SECONDS:
            why = f"each of its tokens takes {each * 1000:.0f} ms; reduce alternatives that overlap"
            raise self._failure(why)

    def advance(self, token: int) -> None:
        self._forced = self._forced[1:] if self._forced[:1] == [token] else []
        if token not in self._table.end_ids:
            self._try(lambda matcher: matcher.consume_token(token))
            self._tokens.append(token)

    def forced(self) -> list[int]:
        """The tokens of the text that must follow, as the tokenizer would spell it; an end token if only the end can
        follow; empty if the grammar leaves a choice.
        """
        if not self._forced:  # else still forced: found again at every step, a long text would take quadratic time
            self._forced = self._try(self._found_forced)
        return list(self._forced)

    def admitted(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The nodes of a draft tree, ascending, that the grammar allows after their ancestors. The state does not move.

        Nodes beyond the grammar's limits are not admitted, since the answer may never come to them.
        """
        if not self._drafts:
            return []
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        admitted, matcher = list[int](), self._matcher.deep_copy()

        def visit(above: int) -> None:
            for node in children.get(above, ()):
                token = tokens[node]
                if not (0 <= token < self._table.vocab_size and self._follows(matcher, token)):
                    continue
                admitted.append(node)
                if node in children and token not in self._table.end_ids and matcher.consume_token(token):
                    visit(node)
                    matcher.rollback(1)

        visit(-1)
        self._drafts = not matcher.is_error()
        return sorted(admitted)

    def _follows(self, matcher: llguidance.LLMatcher, token: int) -> bool:
        if token in self._table.end_ids:
            return matcher.is_accepting()
        return not matcher.is_stopped() and matcher.validate_tokens([token]) == 1

    def _found_forced(self, matcher: llguidance.LLMatcher) -> list[int]:
        return [self._table.end_ids[-1]] if matcher.is_stopped() else list(matcher.compute_ff_tokens())

    def _try(self, step: Callable[[llguidance.LLMatcher], T]) -> T:
        """Take a step. If it fails, take it again with a lexer of the answer's own: what fails then is this answer's.
        Raises the error with which the answer ends.
        """
        result = step(self._matcher)
        if not self._matcher.is_error():
            return result
        others, self._grammar.broken = self._grammar.broken, True
        if self._grammar.quick and not self._alone:
            self._go_alone()
            result = step(self._matcher)
            if not self._matcher.is_error():
                return result
        elif others and not self._alone:
            message = "another answer in this form went beyond the limits of its grammar; send the request again"
            raise OverloadedError(message, retry_after=AGAIN_SECONDS)
        raise self._failure(reason(self._matcher.get_error()))

    def _go_alone(self) -> None:
        self._alone, self._matcher = True, self._grammar.own()
        for token in self._tokens:
            if not self._matcher.consume_token(token):
                break

    def _failure(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"the answer cannot go on in the required form: {why}", param=self._grammar.param)


def reason(error: str) -> str:
    """What llguidance's error says about the grammar, which it may quote, without the state of its parser or stack."""
    first, _, rest = error.partition("\n")
    lowered = first.lower()
    if "panic" in lowered:
        return "the compiler cannot handle this grammar; simplify it"
    if "too many" in lowered or "row has" in lowered or "fuel" in lowered or "too complex" in lowered:
        return "at one position it allows too many ways on; reduce counted repetitions and alternatives that overlap"
    if "NoExtension" in first:
        return "no text fits it from here on"
    if first.endswith("regex parse error:"):
        first += next((line.removeprefix("error:") for line in rest.split("\n") if line.startswith("error:")), "")
    return first.strip()[:300]


STORED: Final = 32  # compiled grammars that are stored, since agents send the same schema again and again
LARGE: Final = 16  # small grammars that a large one counts for
SMALL: Final = 20_000  # characters
# Expressions that must hold at once, and counted groups in counted groups, take much of both however short they are.
_COSTLY: Final = re.compile(r"&|\)\s*\{\s*\d.*\)\s*\{\s*\d", re.DOTALL)
MOST_SECONDS: Final = 60.0  # of a trial, with the start of its process, on a machine however busy


class GrammarTrial:
    """Compiles large grammars in other processes first, one at a time, each in its own. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, setup: dict[str, Any], source: str) -> None:
        """Block until a process has compiled a grammar, with the tokenizer that `setup` describes.

        Raises `ValueError` with the reason why it cannot be compiled within the limits, `OverloadedError` if that is
        not known now, `ShuttingDownError` after `close`, and `EngineError` if no process can be started.
        """
        asked = json.dumps({**setup, "source": source}).encode()
        with self._lock, self._started() as process:
            try:
                verdict, _ = process.communicate(asked, timeout=MOST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                verdict = b""
        self._require_open()
        if not verdict.endswith(b"\n"):
            logger.warning("a grammar of %d characters ended its compiler with %d", len(source), process.returncode)
            raise _death(process.returncode)
        if error := json.loads(verdict):
            raise ValueError(error)

    def close(self) -> None:
        """End the process, and whatever it is compiling."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def _require_open(self) -> None:
        if self._closed:
            raise ShuttingDownError("the engine is shutting down")

    def _started(self) -> subprocess.Popen[bytes]:
        self._require_open()
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", str(Path(worker.__file__).resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the process that asks
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
            )
        except OSError as error:
            raise EngineError(f"large grammars cannot be compiled: no process can be started: {error}") from error
        if self._closed:
            process.kill()
        return process


def _death(status: int) -> Exception:
    """The error for a process that ended without a verdict."""
    if status >= 0:
        return EngineError("large grammars cannot be compiled: the process that tries them out does not start")
    if -status == signal.SIGKILL:  # the machine is too busy, or short of memory
        return OverloadedError("this machine has no time or memory to compile a large grammar now")
    if -status in (signal.SIGSEGV, signal.SIGBUS):
        return ValueError("compiling it needs too much stack: nest less, and let fewer rules lead to one another")
    if -status == signal.SIGXCPU:
        return ValueError(f"compiling it takes more than {CPU_SECONDS} seconds: make it smaller")
    return ValueError("compiling it needs too much memory: make it smaller")


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe. The tokenizer's tables are built on first use (about a second)."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._end_ids = tuple(sorted(end_ids))
        self._tokenizer = tokenizer
        self._table: TokenTable | None = None
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._stored: OrderedDict[bytes, tuple[CompiledGrammar, int]] = OrderedDict()
        self._trial = GrammarTrial()

    @property
    def table(self) -> TokenTable:
        """The model's tokens. Raises `InvalidRequestError` if this model's tokens cannot be constrained."""
        with self._building:
            if self._table is None:
                self._table = TokenTable(self._vocab_size, self._end_ids, built_tokenizer(**self._setup()))
            return self._table

    def known(self, source: str, *, param: str, tenant: str = DEFAULT_TENANT) -> CompiledGrammar | None:
        """The grammar if it was compiled before for this tenant, and no answer broke it."""
        key = _key(source, param, tenant)
        with self._lock:
            grammar, _ = self._stored.get(key, (None, 0))
            if grammar is None or grammar.broken:
                return None
            self._stored.move_to_end(key)
            return grammar

    def compile(self, source: str, *, param: str, tenant: str = DEFAULT_TENANT) -> CompiledGrammar:
        """Compile `source`, in llguidance's notation; blocks, for a large one for seconds.

        Raises `InvalidRequestError` naming `param` for a grammar that is invalid or beyond the limits, and
        `EngineError` if no process can try out a large one.
        """
        if (known := self.known(source, param=param, tenant=tenant)) is not None:
            return known
        large = is_large(source)
        try:
            if large:
                self._trial.check(self._setup(), source)
            grammar = on_stack(STACK, lambda: self._compiled(source, param))
        except ValueError as error:
            message = f"the grammar of this request is refused: {reason(str(error))}"
            raise InvalidRequestError(message, param=param) from None
        except InvalidRequestError as error:
            error.param = error.param or param
            raise
        with self._lock:
            self._stored[_key(source, param, tenant)] = (grammar, LARGE if large else 1)
            while sum(weight for _, weight in self._stored.values()) > STORED:
                self._stored.popitem(last=False)
        return grammar

    def symbol(self, text: str) -> str:
        """How a grammar must write `text`: as a token if it is one special token, else as a string literal."""
        token = self._tokenizer.get_vocab().get(text)
        special = token is not None and self.table.tokenizer.is_special_token(token)
        return f"<[{token}]>" if special else lark_string(text)

    def close(self) -> None:
        self._trial.close()

    def _compiled(self, source: str, param: str) -> CompiledGrammar:
        grammar = CompiledGrammar(self.table, source, param)
        grammar.start().mask()  # a grammar that allows no first token is refused now
        return grammar

    def _setup(self) -> dict[str, Any]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._end_ids:
            raise InvalidRequestError(
                "this model's answers cannot be constrained: that needs a fast tokenizer and an end token"
            )
        size = max(self._vocab_size, len(self._tokenizer))
        return {"tokenizer": backend.to_str(), "vocab_size": size, "end_ids": list(self._end_ids)}


def is_large(source: str) -> bool:
    """Whether a grammar is tried out first. Of a small one llguidance's limits end it before it takes much."""
    return len(source) > SMALL or _COSTLY.search(source) is not None


def _key(source: str, param: str, tenant: str) -> bytes:
    return hashlib.sha256(f"{tenant}\0{param}\0{source}".encode(errors="surrogatepass")).digest()
