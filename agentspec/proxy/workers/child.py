"""One of the gateway's processes as the parent sees it: its life, its restarts, and the messages to it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentspec.proxy.logs import logger
from agentspec.proxy.workers.channel import Channel, Message
from agentspec.proxy.workers.handover import Recipient
from agentspec.proxy.workers.key_limits import WorkerKeyLimits
from agentspec.proxy.workers.places import WorkerPlaces
from agentspec.proxy.workers.process import spawn

WORKER, ENGINE = "agentspec.proxy.workers.worker", "agentspec.proxy.workers.engine"
MOST_FAILED_STARTS = 5
FIRST_DELAY, LONGEST_DELAY = 0.25, 10.0  # seconds before a process is started again
STEADY_SECONDS = 10.0  # a process that lived for so long is started again at once
KILL_SECONDS = 5.0  # that a process has to exit once its channel is closed
LATE_SECONDS = 3.0  # of silence; every process reports its metrics once a second


@dataclass(slots=True)
class Life:
    """A process from its start to its end. `places`, `key_limits` and `recipient` are a worker's.

    `ready`: it has loaded everything; `ending`: it takes no more connections. `failure`: the class and the message of
    the error that it reported. `silence`: seconds since its last message, and `loading`: until it was ready, both by
    the parent's ticks.
    """

    process: subprocess.Popen[bytes]
    channel: Channel
    since: float
    places: WorkerPlaces | None = None
    key_limits: WorkerKeyLimits | None = None
    recipient: Recipient | None = None
    started: bool = False
    ready: bool = False
    ending: bool = False
    silence: float = 0.0
    loading: float = 0.0
    gone: float | None = None  # when its channel was closed
    failure: tuple[str, str] | None = None

    def leave_all(self) -> None:
        """Take back what a worker's requests hold."""
        if self.places is not None:
            self.places.leave_all()
        if self.key_limits is not None:
            self.key_limits.leave_all()


@dataclass(slots=True)
class Child:
    """A process that is started again when it ends. `life` is None while it does not run."""

    name: str
    module: str
    life: Life | None = None
    failed_starts: int = 0
    restart_at: float = 0.0
    ever_ready: bool = False
    failure: tuple[str, str] | None = None  # the class and the message of the error that it reported last
    status: int | None = None  # of its last end
    _delay: float = field(default=FIRST_DELAY)

    @property
    def is_worker(self) -> bool:
        return self.module == WORKER

    @property
    def gives_up(self) -> bool:
        """Whether another start makes no sense: it said so itself, or ended too often before it was ready."""
        refused = self.failed_starts > 0 and self.failure is not None and not self.ever_ready
        return refused or self.failed_starts >= MOST_FAILED_STARTS

    async def start(
        self,
        told: dict[str, Any],
        received: Callable[[Child, Message], None],
        make_places: Callable[[Callable[..., None]], tuple[WorkerPlaces, WorkerKeyLimits]],
    ) -> None:
        """Start the process, which is told `told`; its messages go to `received`. Raises `OSError` if that fails."""
        ours, theirs = socket.socketpair()
        pairs = [theirs]
        start = {**told, "name": self.name, "channel": theirs.fileno(), "handover": -1}
        recipient = None
        if self.is_worker:
            give, take = socket.socketpair()
            pairs.append(take)
            start["handover"], recipient = take.fileno(), Recipient(give)
        try:
            process = await asyncio.to_thread(spawn, self.module, start, pairs)
        except OSError:
            ours.close()
            raise
        finally:
            for one in pairs:
                one.close()
        loop = asyncio.get_running_loop()
        channel = Channel(lambda message: self._heard(message, received), lambda: self._gone(loop.time()))
        await channel.open(ours)
        places, key_limits = make_places(channel.send) if self.is_worker else (None, None)
        self.life = Life(process, channel, loop.time(), places, key_limits, recipient)

    def send(self, *message: Any) -> None:
        if self.life is not None:
            self.life.channel.send(*message)

    def poll(self, now: float) -> Life | None:
        """The life that is over, if it has just ended; decides when the next one begins."""
        life = self.life
        if life is None:
            return None
        if life.gone is None:  # or else its last messages would be lost
            return None
        if now - life.gone > KILL_SECONDS:
            life.process.kill()
        self.status = life.process.poll()
        if self.status is None:
            return None
        self.life, self.failure = None, life.failure
        self._decide(life, now)
        return life

    def watch(self, seconds: float, *, hang_timeout: float, load_timeout: float) -> None:
        """Count a tick of `seconds`, and kill a process that has not loaded in `load_timeout`, or that has and was
        silent for `hang_timeout`; 0 is without end.

        Loading does not hang while it downloads, and it may be silent while it reads a model: nothing but time tells.
        Ticks are counted and not the clock, so that a machine or a terminal that stops all processes kills none.
        """
        life = self.life
        if life is None or life.gone is not None:
            return
        life.silence += seconds
        if life.recipient is not None:
            life.recipient.late = life.silence > LATE_SECONDS
        if not life.ready:
            life.loading += seconds
        if hang_timeout and life.ready and life.silence > hang_timeout:
            self._kill(life, "process does not answer and is killed", hang_timeout)
        elif load_timeout and not life.ready and life.loading > load_timeout:
            self._kill(life, "process has not loaded in time (server.load_timeout) and is killed", load_timeout)

    def _kill(self, life: Life, why: str, seconds: float) -> None:
        logger.error(why, process=self.name, seconds=seconds)
        life.silence = life.loading = 0.0
        life.process.kill()

    def _heard(self, message: Message, received: Callable[[Child, Message], None]) -> None:
        if self.life is not None:
            self.life.silence = 0.0
        received(self, message)

    def _decide(self, life: Life, now: float) -> None:
        self.ever_ready |= life.ready
        self.failed_starts = 0 if life.ready else self.failed_starts + 1
        steady = life.ready and (now - life.since > STEADY_SECONDS or self.status == 0)
        self._delay = FIRST_DELAY if steady else min(2 * self._delay, LONGEST_DELAY)
        self.restart_at = now if steady else now + self._delay

    def _gone(self, now: float) -> None:
        if self.life is not None:
            self.life.gone = now
            self.life.leave_all()

    def not_started(self, now: float) -> None:
        """Note that the system could not start it now."""
        self.failed_starts += 1
        self._delay = min(2 * self._delay, LONGEST_DELAY)
        self.restart_at = now + self._delay

    def log_end(self) -> None:
        """Log an end that nobody asked for."""
        error, _ = self.failure or (None, None)
        logger.error("process ended", process=self.name, status=self.status, error=error)
