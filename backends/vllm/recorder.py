"""Remembers what a server says, in a thread of its own: the server's thread hands tokens over and goes on.

Whatever the database does, a slow disk or a lost server, happens here or further behind.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agentspec.backends.vllm.request_state import Conversation, Memory
from agentspec.cache.tokens import Tokens
from agentspec.telemetry.safe_errors import safe_message

WAITING_TOKENS = 8 << 20  # that may wait to be remembered: some seconds' worth, even of long prompts
IDLE_SECONDS = 10.0  # more than a step takes

logger = logging.getLogger(__name__)

Open = Callable[[Conversation, Tokens], Memory]


class Said(NamedTuple):
    """What an output grew by; of the last draft, if there was one, so much was accepted."""

    conversation: Conversation
    tokens: Tokens
    drafted: int
    accepted: int


class Recorder:
    """Carries out, in order, what `begin`, `extend` and `end` ask for.

    `open_memory` makes the memory of a conversation from its prompt. `idle` is called, in the recorder's thread, when
    nothing was asked for a while, and before it ends. A conversation whose memory fails goes on without; the log says
    so once.
    """

    def __init__(self, open_memory: Open, idle: Callable[[], None] = lambda: None) -> None:
        self._open = open_memory
        self._idle = idle
        self._queue: queue.SimpleQueue[tuple[Callable[..., None], tuple[object, ...], int] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        self._failed = False
        self.dropped = 0  # conversations that came while too much was waiting
        self._thread = threading.Thread(target=self._work, name="agentspec-recorder", daemon=True)
        self._thread.start()

    def begin(self, conversation: Conversation, prompt: Tokens) -> None:
        """Make the conversation's memory ready; without one where too much is waiting already."""
        if self._waiting + len(prompt) > WAITING_TOKENS:
            self.dropped += 1
            conversation.ready.set()
            return
        self._put(self._begin, conversation, prompt, tokens=len(prompt))

    def extend(self, said: Sequence[Said]) -> None:
        """What all outputs of a round grew by."""
        self._put(self._extend, said, tokens=sum(len(one.tokens) for one in said))

    def end(self, conversation: Conversation) -> None:
        """The output is complete."""
        self._put(self._end, conversation)

    def flush(self, timeout: float) -> bool:
        """Wait until all asked for so far is done; whether it is."""
        done = threading.Event()
        self._put(lambda: done.set())
        return done.wait(timeout)

    def close(self) -> None:
        """Carry out what was asked for, then stop. Idempotent."""
        self._queue.put(None)
        self._thread.join()

    def _put(self, act: Callable[..., None], *args: object, tokens: int = 0) -> None:
        with self._lock:
            self._waiting += tokens
        self._queue.put((act, args, tokens))

    def _work(self) -> None:
        while True:
            try:
                asked = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._idle()
                continue
            if asked is None:
                break
            self._do(*asked)
        self._idle()
        while not self._queue.empty():
            if asked := self._queue.get():
                self._do(*asked)

    def _do(self, act: Callable[..., None], args: tuple[object, ...], tokens: int) -> None:
        act(*args)
        with self._lock:
            self._waiting -= tokens

    def _begin(self, conversation: Conversation, prompt: Tokens) -> None:
        try:
            conversation.memory = self._open(conversation, prompt)
        except Exception as error:
            self._report(error)
        conversation.ready.set()

    def _extend(self, said: Sequence[Said]) -> None:
        for conversation, tokens, drafted, accepted in said:
            memory = conversation.memory
            if memory is None:
                continue
            try:
                if drafted:
                    memory.count_draft(drafted, accepted)
                memory.extend(tokens)
            except Exception as error:
                self._give_up(conversation, memory, error)

    def _end(self, conversation: Conversation) -> None:
        memory, conversation.memory = conversation.memory, None
        if memory is None:
            return
        try:
            memory.close()
        except Exception as error:
            self._report(error)

    def _give_up(self, conversation: Conversation, memory: Memory, error: Exception) -> None:
        conversation.memory = None
        self._report(error)
        try:
            memory.abandon()
        except Exception as further:
            self._report(further)

    def _report(self, error: Exception) -> None:
        level = logging.DEBUG if self._failed else logging.WARNING
        self._failed = True
        logger.log(level, "agentspec: a request goes on without the token cache: %s", safe_message(error))


def wait_ready(conversations: Sequence[Conversation], seconds: float) -> None:
    """Until all have what memory they will have, or that long in all."""
    until = time.perf_counter() + seconds
    for conversation in conversations:
        left = until - time.perf_counter()
        if left <= 0 or not conversation.ready.wait(left):
            return
