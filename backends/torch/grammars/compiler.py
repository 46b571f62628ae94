"""Compiles grammars for one model: small ones at once, larger ones after another process has survived them."""

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
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from agentspec.backends.torch.grammars import worker
from agentspec.backends.torch.grammars.matcher import CompiledGrammar, TokenTable, reason
from agentspec.backends.torch.grammars.notation import lark_string
from agentspec.backends.torch.grammars.worker import STACK, built_tokenizer, on_stack
from agentspec.errors import EngineError, InvalidRequestError, OverloadedError, ShuttingDownError

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
