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
    FEW_STATES,
    MOST_STATES,
    STACK,
    STATE_BYTES,
    STEP_SECONDS,
    TRIED_TOKENS,
    built_tokenizer,
    compiled,
    on_stack,
)
from agentspec.errors import EngineError, InvalidRequestError, OverloadedError, ShuttingDownError

T = TypeVar("T")
MAX_STARTS: Final = 256  # answers after which a grammar is compiled again, since what its lexer keeps only grows
RENEWAL_SECONDS: Final = 0.05  # a grammar that takes longer to compile is not compiled again between two steps
AGAIN_SECONDS: Final = 5.0  # until such a grammar is compiled for the next request, for Retry-After
_FILLED_UP: Final = "too many states"  # what answers left in their lexer together, not what one of them did


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The tokens that a grammar speaks of: `vocab_size` of the model, those that end an answer, and their texts."""

    vocab_size: int
    end_ids: tuple[int, ...]
    tokenizer: llguidance.LLTokenizer


@dataclass(slots=True, eq=False)
class SharedLexer:
    """A grammar at the start of an answer. The answers begun from it share its lexer, which grows up to `states`, and
    fails for all of them once it failed for one: it is then `broken`.
    """

    matcher: llguidance.LLMatcher
    states: int = MOST_STATES
    broken: bool = False

    def fails(self) -> bool:
        """Whether the lexer failed; else an answer's error is its own."""
        fresh = self.matcher.deep_copy()
        fresh.compute_bitmask()
        return bool(fresh.is_error())


class CompiledGrammar:
    """A compiled grammar, shared by all answers that must follow it. `param` is the request's field that asked for it,
    `size` the bytes it takes before any answer.

    When an answer breaks the lexer of a grammar that is compiled quickly, it is compiled again and the others go on; of
    one that is not, they end with `OverloadedError`. The first lexer of a `small` grammar that is compiled quickly has
    few states, so that ever new forms take little memory; those that replace it have many.
    """

    def __init__(self, table: TokenTable, source: str, param: str, *, size: int = 0, small: bool = True) -> None:
        started = time.thread_time()
        self.table = table
        self.param = param
        self._source = source
        self._size = size
        self._lexer = self._small() if small else self._compiled()
        self._starts = 0
        self._lock = threading.Lock()
        self.quick = time.thread_time() - started <= RENEWAL_SECONDS
        if not self.quick and self._lexer.states < MOST_STATES:  # nothing replaces it in time
            self._lexer = self._compiled()

    @property
    def nbytes(self) -> int:
        """The most bytes that it takes, with all that its lexer may learn from answers."""
        return self._size + self._lexer.states * STATE_BYTES

    @property
    def worn(self) -> bool:
        """Whether it should be compiled again before the next answer."""
        return self._starts > MAX_STARTS or (self._lexer.broken and not self.quick)

    def start(self) -> GrammarMatcher:
        """The state at the start of an answer. Raises `OverloadedError` as `sound_lexer` does."""
        self._starts += 1
        return GrammarMatcher(self, self.sound_lexer())

    def sound_lexer(self) -> SharedLexer:
        """The lexer that answers share now. Raises `OverloadedError` if it is broken and takes long to compile again,
        which the next request with this grammar then does.
        """
        with self._lock:
            if self._lexer.broken:
                if not self.quick:
                    message = (
                        "another answer in this form went beyond the limits of its grammar; send the request again"
                    )
                    raise OverloadedError(message, retry_after=AGAIN_SECONDS)
                self._lexer = self._compiled_again()
            return self._lexer

    def own_lexer(self) -> SharedLexer | None:
        """A lexer for one answer alone; None if it would take long to compile one."""
        return self._compiled_again() if self.quick else None

    def _compiled(self, states: int = MOST_STATES) -> SharedLexer:
        return SharedLexer(compiled(self.table.tokenizer, self._source, states), states)

    def _small(self) -> SharedLexer:
        """With few states, unless more are needed before the first token."""
        try:
            lexer = self._compiled(FEW_STATES)
        except ValueError as error:
            if _FILLED_UP not in str(error):
                raise
        else:
            if not lexer.fails():
                return lexer
        return self._compiled()

    def _compiled_again(self) -> SharedLexer:
        return on_stack(STACK, self._compiled)


class GrammarMatcher:
    """The grammar's state after the answer so far. Not thread-safe.

    An end token is allowed once the text satisfies the grammar, and forced when no other token is allowed. All methods
    raise `InvalidRequestError` when a step is beyond the limits of time and memory, or when no text can go on, and
    `OverloadedError` when another answer broke a lexer that takes long to compile again.
    """

    def __init__(self, grammar: CompiledGrammar, lexer: SharedLexer) -> None:
        self._grammar = grammar
        self._table = table = grammar.table
        self._lexer = lexer
        self._matcher = lexer.matcher.deep_copy()
        self._bits = np.zeros((max(table.vocab_size, table.tokenizer.vocab_size) + 31) // 32, dtype=np.int32)
        self._forced: list[int] = []
        self._tokens: list[int] = []
        self._broke_one = False  # whether a step of this answer broke a lexer
        self._drafts = True
        self._masks, self._seconds = 0, 0.0  # of this thread, for the masks of late

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; far cheaper than `mask`."""
        return self._try(lambda matcher: self._follows(matcher, token))

    def mask(self) -> Tensor:
        """Which tokens may come next, as bool [vocab] with at least one True."""
        started = time.thread_time()
        self._try(lambda matcher: matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes))
        self._took(time.thread_time() - started)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._table.vocab_size]
        if not bits.any():
            raise self._failure("no token of this model can go on with it")
        return torch.from_numpy(bits.view(np.bool_))

    def _took(self, seconds: float) -> None:
        """Count a mask. Raises the error with which the answer ends if masks take so long that others wait for it."""
        self._masks, self._seconds = self._masks + 1, self._seconds + seconds
        if self._masks < TRIED_TOKENS:
            return
        each, self._masks, self._seconds = self._seconds / self._masks, 0, 0.0
        if each > STEP_SECONDS:
            why = f"each of its tokens takes {each * 1000:.0f} ms; reduce alternatives that overlap"
            raise self._failure(why)

    def advance(self, token: int) -> None:
        """Append `token`, which must be allowed, to the answer."""
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
        """The nodes of a draft tree, ascending, that the grammar allows after their ancestors. Keeps the state.

        Nodes beyond the grammar's limits are not admitted, since the answer may never come to them.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        admitted: list[int] = []
        if not self._drafts or self._lexer.broken:
            return admitted
        matcher = self._matcher.deep_copy()
        self._visit(matcher, -1, children, tokens, admitted)
        if matcher.is_error():  # that may cost drafts only, even if the lexer is broken, which is the answer's too
            self._drafts, self._lexer.broken = False, self._lexer.fails()
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
            if not (0 <= token < self._table.vocab_size and self._follows(matcher, token)):
                continue
            admitted.append(node)
            if node in children and token not in self._table.end_ids and matcher.consume_token(token):
                self._visit(matcher, node, children, tokens, admitted)
                matcher.rollback(1)

    def _follows(self, matcher: llguidance.LLMatcher, token: int) -> bool:
        if token in self._table.end_ids:
            return matcher.is_accepting()
        return not matcher.is_stopped() and matcher.validate_tokens([token]) == 1

    def _found_forced(self, matcher: llguidance.LLMatcher) -> list[int]:
        return [self._table.end_ids[-1]] if matcher.is_stopped() else list(matcher.compute_ff_tokens())

    def _try(self, step: Callable[[llguidance.LLMatcher], T]) -> T:
        """Take a step. If it fails because of the lexer, take it again with another one: with the one that answers
        share now if another answer broke it, and else with one of its own, so that what fails then is this answer's.
        """
        result = step(self._matcher)
        while self._matcher.is_error():
            self._move(self._matcher.get_error())
            result = step(self._matcher)
        return result

    def _move(self, error: str) -> None:
        """Go on with another lexer after `error`. Raises the error with which the answer ends if there is none."""
        lexer = None
        if not self._lexer.broken:
            self._lexer.broken = self._lexer.fails()
            if self._broke_one or not self._lexer.broken:
                raise self._failure(reason(error))
            self._broke_one = True
            lexer = self._grammar.own_lexer()
            if lexer is None and _FILLED_UP not in error:
                raise self._failure(reason(error))
        self._lexer = lexer or self._grammar.sound_lexer()
        self._matcher = self._lexer.matcher.deep_copy()
        for token in self._tokens:
            if not self._matcher.consume_token(token):
                break

    def _failure(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"the answer cannot go on in the required form: {why}", param=self._grammar.param)


def reason(error: str) -> str:
    """What llguidance's error says of the grammar, which it may quote; never the state of its parser or stack."""
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


logger = logging.getLogger(__name__)

KEPT: Final = 48  # compiled grammars kept, since agents send the same schema again and again
KEPT_BYTES: Final = 256 << 20  # with all that they may learn from answers
SMALL: Final = 20_000  # characters
# Expressions that must hold at once, and counted groups in counted groups, take much of both however short they are.
_COSTLY: Final = re.compile(r"&|\)\s*\{\s*\d.*\)\s*\{\s*\d", re.DOTALL)
MAX_GRAMMAR_BYTES: Final = 128 << 20
MOST_SECONDS: Final = 60.0  # of a trial, with the start of its process, on a machine however busy
_DEATHS: Final[dict[int, str]] = {
    signal.SIGSEGV: "compiling it needs too much stack: nest less, and let fewer rules lead to one another",
    signal.SIGBUS: "compiling it needs too much stack: nest less, and let fewer rules lead to one another",
    signal.SIGABRT: "compiling it needs too much memory: make it smaller",
    signal.SIGXCPU: f"compiling it takes more than {worker.CPU_SECONDS} seconds: make it smaller",
}


class GrammarTrial:
    """Tries out large grammars in other processes, one at a time, each in its own. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def bytes_of(self, setup: dict[str, Any], source: str) -> int:
        """How many bytes the compiled grammar takes, with the tokenizer that `setup` describes. Blocks until a process
        has compiled it.

        Raises `ValueError` with the reason why it cannot be compiled within the limits, `OverloadedError` if that is
        not known now, `ShuttingDownError` after `close`, and `EngineError` if no process can be started.
        """
        with self._lock, self._started() as process:
            late = threading.Timer(MOST_SECONDS, process.kill)
            late.start()
            try:
                said, _ = process.communicate(json.dumps({**setup, "source": source}).encode())
            finally:
                late.cancel()
        self._require_open()
        if not said.endswith(b"\n"):
            raise _death(process.returncode, len(source))
        verdict = json.loads(said)
        if "error" in verdict:
            raise ValueError(verdict["error"])
        if verdict["nbytes"] > MAX_GRAMMAR_BYTES:
            raise ValueError(f"it takes more than {MAX_GRAMMAR_BYTES >> 20} MiB: make it smaller")
        return int(verdict["nbytes"])

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


def _death(status: int, length: int) -> Exception:
    """What the end of the process without a verdict says of a grammar."""
    logger.warning("a grammar of %d characters ended its compiler with status %d", length, status)
    if status >= 0:
        return EngineError("large grammars cannot be compiled: the process that tries them out does not start")
    if -status == signal.SIGKILL:  # the machine is too busy, or short of memory
        return OverloadedError("this machine has no time or memory to compile a large grammar now")
    return ValueError(_DEATHS.get(-status, _DEATHS[signal.SIGABRT]))


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
        self._trial = GrammarTrial()

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
        grammar = self._known(key)
        if grammar is None:
            try:
                small = _small(source)
                size = len(source) if small else self._trial.bytes_of(self._setup(), source)
                grammar = on_stack(STACK, lambda: self._compiled(source, param, size, small))
            except ValueError as error:
                message = f"the grammar of this request is refused: {reason(str(error))}"
                raise InvalidRequestError(message, param=param) from None
            except InvalidRequestError as error:
                error.param = error.param or param
                raise
        self._keep(key, grammar)  # a known one too: answers may have let it, or others, grow
        return grammar

    def waits(self, source: str, *, param: str) -> bool:
        """Whether `compile` would wait for another process: for a large grammar that it does not know yet."""
        return not _small(source) and self._known(_key(source, param)) is None

    def symbol(self, text: str) -> str:
        """How a grammar must write `text`: as a token if it is one special token, else as a string literal."""
        token = self._tokenizer.get_vocab().get(text)
        special = token is not None and self.table.tokenizer.is_special_token(token)
        return f"<[{token}]>" if special else lark_string(text)

    def close(self) -> None:
        """End the other process."""
        self._trial.close()

    def _known(self, key: bytes) -> CompiledGrammar | None:
        with self._lock:
            kept = self._kept.get(key)
        return None if kept is None or kept.worn else kept

    def _compiled(self, source: str, param: str, size: int, small: bool) -> CompiledGrammar:
        grammar = CompiledGrammar(self.table, source, param, size=size, small=small)
        grammar.start().mask()  # a grammar that allows no first token is refused now
        return grammar

    def _keep(self, key: bytes, grammar: CompiledGrammar) -> None:
        with self._lock:
            self._kept[key] = grammar
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT or sum(one.nbytes for one in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)

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
