"""Starts another process of the gateway, and what that process does first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from agentspec.backends.heap import share_heaps
from agentspec.proxy import logs
from agentspec.settings.load import Settings

# Runs with the module search path of the parent, which is the third argument. A terminal signals every process, but
# only the parent acts on it.
_PROGRAM = (
    "import signal, sys, json; from importlib import import_module;"
    " signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN);"
    " sys.path[:] = json.loads(sys.argv[3]); import_module(sys.argv[1]).main()"
)


@dataclass(frozen=True, slots=True)
class Start:
    """What a process is told at its start.

    `name` stands in its log lines; `channel` and `handover` are numbers of open files, ends of socket pairs with the
    parent (`handover` of workers only). `engine` is the socket of the engine's process, None without one. `capacity` is
    the number of connections to all workers. The parent was started at `since`, in seconds since 1970.
    """

    name: str
    settings: Settings
    log_level: str
    channel: int
    handover: int
    engine: Path | None
    capacity: int
    since: int


def spawn(module: str, start: Mapping[str, Any], files: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """Run `main` of `module` in a new process with the open `files`, which tells it `start`, the fields of `Start`.

    The new interpreter shares nothing with this process: threads, locks and event loops are not copied.
    """
    command = [sys.executable, "-P", "-c", _PROGRAM, module, str(start["name"]), json.dumps(sys.path)]
    numbers = [one.fileno() for one in files]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=numbers)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as told:  # if it is gone already, the caller notices
        told.write(json.dumps({**start, "settings": packed(start["settings"])}, default=str).encode())
    return process


def read_start() -> Start:
    """What the parent told this process. Sets up its log."""
    share_heaps()
    told = json.load(sys.stdin.buffer)
    engine = told["engine"] and Path(told["engine"])
    start = Start(**{**told, "settings": unpacked(told["settings"]), "engine": engine})
    shown = int(start.name) if start.name.isdecimal() else start.name
    logs.configure(start.log_level, background=True, fields={"worker": shown})
    logs.logger.debug("process started", pid=os.getpid())
    logs.quiet_server()
    return start


def adopt(number: int) -> socket.socket:
    """The end of a socket pair that the parent passed on."""
    os.set_inheritable(number, False)
    return socket.socket(fileno=number)


def packed(settings: Settings) -> str:
    """Settings as they travel in a message, with their secrets."""
    return json.dumps(_plain(settings.model_dump(exclude_unset=True)), default=str)


def unpacked(text: str) -> Settings:
    """What `packed` was given."""
    return Settings.model_validate(json.loads(text))


def _plain(value: Any) -> Any:
    """`value` as JSON has it; what is neither a secret nor a container is left to the encoder."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple | set | frozenset) else value
