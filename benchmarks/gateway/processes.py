"""Starts the upstream, the gateway and the load client, and reads what each of them has used."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentspec.benchmarks.gateway.wire import Script, Target
from agentspec.errors import AgentSpecError, ConfigurationError

START_SECONDS = 60.0
STOP_SECONDS = 60.0
TENANTS = ("red", "blue")
PROC = Path("/proc")

Marked = Callable[[dict[str, Any]], None]


class BenchmarkFailedError(AgentSpecError):
    """A process of the benchmark ended or did not start; the message quotes what it said."""


@dataclass(frozen=True, slots=True)
class LineProcess(AbstractContextManager["LineProcess"]):
    """A program that is spoken to in lines of JSON, and that ends with its input."""

    popen: subprocess.Popen[str]

    @classmethod
    def start(cls, module: str, *arguments: str) -> LineProcess:
        command = [sys.executable, "-m", f"agentspec.benchmarks.gateway.{module}", *arguments]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def hear(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise BenchmarkFailedError("a process of the benchmark ended early; its message stands above")
        return json.loads(line)

    def __exit__(self, *exception: object) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


@dataclass(frozen=True, slots=True)
class UpstreamProcess:
    """The scripted upstream."""

    process: LineProcess
    target: Target

    def processor(self) -> float:
        """Seconds of processor time so far."""
        self.process.tell("usage")
        return float(self.process.hear()["processor"])


@dataclass(frozen=True, slots=True)
class ClientProcess:
    """The load client."""

    process: LineProcess

    def do(self, job: str, *, marked: Marked = lambda mark: None, **arguments: Any) -> dict[str, Any]:
        """The result of a job; `marked` is called with each mark as it comes."""
        self.process.tell(json.dumps({"job": job, **arguments}, default=_plain))
        while "result" not in (said := self.process.hear()):
            marked(said)
        return dict(said["result"])


def _plain(value: object) -> object:
    if isinstance(value, (Target, Script)):
        return asdict(value)
    raise TypeError(type(value).__name__)


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """`agentspec serve` with two tenants and otherwise default settings."""

    popen: subprocess.Popen[bytes]
    target: Target

    @property
    def _folder(self) -> Path:
        return PROC / str(self.popen.pid)

    def processor(self) -> float:
        """Seconds of processor time so far, in user and system mode, of all threads."""
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> int:
        """Bytes of memory in use."""
        return int((self._folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def files(self) -> int:
        """Open files and connections."""
        return len(os.listdir(self._folder / "fd"))

    def answers(self, path: str) -> bool:
        """Whether a GET is answered with status 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.target.port, timeout=10)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {self.target.keys[0]}"})
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Bench:
    """The three processes while they run."""

    upstream: UpstreamProcess
    gateway: GatewayProcess
    client: ClientProcess


@contextmanager
def running(folder: Path, *, streams: int, places: int) -> Iterator[Bench]:
    """Start all processes, with files in `folder`, and end them afterwards.

    `streams` is the number of requests that the gateway has to take at once, `places` the number that the upstream
    works on at once. Raises `ConfigurationError` on systems without /proc, and `BenchmarkFailedError`.
    """
    if not (PROC / "self" / "stat").exists():
        raise ConfigurationError("the gateway's processor time is read from /proc: run this benchmark on Linux")
    require_files(4 * streams + 256)
    with LineProcess.start("upstream", str(places)) as upstream, LineProcess.start("client") as client:
        answering = UpstreamProcess(upstream, Target(int(upstream.hear())))
        with _gateway(folder, answering.target.port, streams) as gateway:
            yield Bench(answering, gateway, ClientProcess(client))


def require_files(count: int) -> None:
    """Let this process and its children open so many files. Raises `ConfigurationError` if the system forbids it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise ConfigurationError(
                f"{count} open files are needed, {hard} are allowed: raise ulimit -n or ask for less"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


@contextmanager
def _gateway(folder: Path, upstream: int, streams: int) -> Iterator[GatewayProcess]:
    keys = tuple(secrets.token_hex(16) for _ in TENANTS)
    config, log = folder / "agentspec.toml", folder / "gateway.log"
    config.write_text(_configuration(folder, keys, upstream, streams))
    port = _free_port()
    command = [sys.executable, "-c", "from agentspec.cli import app; app()", "serve", "--config", str(config)]
    with log.open("wb") as out:
        command += ["--port", str(port)]
        popen = subprocess.Popen(command, cwd=folder, stderr=out, stdout=subprocess.DEVNULL)
        gateway = GatewayProcess(popen, Target(port, keys))
        try:
            _wait_until_ready(gateway, log)
            yield gateway
        finally:
            _stop(popen)


def _configuration(folder: Path, keys: tuple[str, ...], upstream: int, streams: int) -> str:
    """Two tenants and a vLLM upstream; limits only where the load goes above the default ones."""
    for tenant, key in zip(TENANTS, keys, strict=True):
        (folder / tenant).write_text(key)
    lines = ["[server]", f"max_concurrent = {max(256, streams + 16)}", "drain_timeout = 1"]
    if streams > 1000:
        lines += [f"max_connections = {4 * streams}"]
    for tenant in TENANTS:
        lines += ["[[server.api_keys]]", f'tenant = "{tenant}"', f'key_file = "{folder / tenant}"']
    lines += [
        "[backends.upstream]",
        'kind = "openai"',
        'server_kind = "vllm"',
        f'base_url = "http://127.0.0.1:{upstream}/v1"',
    ]
    return "\n".join([*lines, ""])


def _wait_until_ready(gateway: GatewayProcess, log: Path) -> None:
    limit = time.monotonic() + START_SECONDS
    while not gateway.answers("/ready"):
        if gateway.popen.poll() is not None or time.monotonic() > limit:
            raise BenchmarkFailedError(f"the gateway did not start: {log.read_text()[-2000:]}")
        time.sleep(0.05)


def _stop(popen: subprocess.Popen[bytes]) -> None:
    popen.send_signal(signal.SIGTERM)
    try:
        popen.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
