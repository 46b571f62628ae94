"""examples/deploy/replicas as it stands: two gateways behind nginx, of which one dies and one is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="replicas are not tested: nginx is not installed"),
]
ANSWER = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}'
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in bound]


class Replicas:
    """The processes, and the address of nginx. The upstream holds each stream until `go` is called."""

    def __init__(self, folder: Path, upstream: str, until: Callable[..., None]) -> None:
        self.folder, self.until = folder, until
        front, *ports = free_ports(3)
        configuration = folder / "nginx.conf"
        text = configuration.read_text()
        for old, new in zip((8700, 8701, 8702), (front, *ports), strict=True):
            text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
        configuration.write_text(text)
        self.url = f"http://127.0.0.1:{front}"
        self.environment = {
            **os.environ,
            "AGENTSPEC_SERVER__SECRET": "s" * 32,
            "AGENTSPEC_BACKENDS__VLLM__PROBE": "off",
        }
        self.environment["AGENTSPEC_BACKENDS__VLLM__BASE_URL"] = upstream
        self.gateways = {port: self.serve(port) for port in ports}
        self.nginx = subprocess.Popen(["nginx", "-p", folder, "-c", "nginx.conf", "-g", "daemon off;"], cwd=folder)
        for port in ports:
            until(lambda port=port: self.answers(f"http://127.0.0.1:{port}/ready"))
        until(lambda: self.answers(f"{self.url}/ready"))

    def answers(self, url: str) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(url).status_code == 200
        return False

    def running(self, port: int) -> float:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        [line] = [one for one in text.splitlines() if one.startswith("agentspec_requests_in_flight ")]
        return float(line.split()[1]) - 1  # this request

    def close(self) -> None:
        for process in (self.nginx, *self.gateways.values()):
            process.terminate()
        for process in (self.nginx, *self.gateways.values()):
            process.wait(60)

    def serve(self, port: int) -> subprocess.Popen[bytes]:
        command = [Path(sys.executable).with_name("agentspec"), "serve", "--config", "agentspec.toml"]
        return subprocess.Popen([*command, "--port", str(port)], cwd=self.folder, env=self.environment)


@pytest.fixture
def replicas(repository: Path, tmp_path: Path, upstream: Any, until: Callable[..., None]) -> Iterator[Any]:
    folder = tmp_path / "replicas"
    shutil.copytree(repository / "examples" / "deploy" / "replicas", folder)

    def script(request: Any) -> None:
        if request.method != "POST" or not request.json.get("stream"):
            request.answer(ANSWER)
            return
        request.head()
        request.send(EVENT)
        request.connection.settimeout(60)
        until(lambda: (folder / "go").exists())
        request.send(EVENT + b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')

    running = Replicas(folder, upstream(script).url, until)
    try:
        yield running
    finally:
        running.close()


def post(replicas: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{replicas.url}/v1/{path}", json=body, timeout=60)


def test_replicas_share_what_they_store_and_outlive_one_another(replicas: Any) -> None:
    stored = post(replicas, "responses", {"model": "m", "input": "hi", "store": True}).json()["id"]
    for port in replicas.gateways:
        assert httpx.get(f"http://127.0.0.1:{port}/v1/responses/{stored}").status_code == 200
    first, second = replicas.gateways
    replicas.gateways[first].kill()
    replicas.gateways[first].wait(60)
    assert {post(replicas, "chat/completions", CHAT).status_code for _ in range(20)} == {200}
    replicas.gateways[first] = replicas.serve(first)  # as a supervisor does
    replicas.until(lambda: replicas.answers(f"http://127.0.0.1:{first}/ready"))
    replicas.gateways[second].kill()
    replicas.gateways[second].wait(60)
    replicas.until(lambda: post(replicas, "chat/completions", CHAT).status_code == 200)


def test_a_replica_that_is_stopped_finishes_its_streams(replicas: Any) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60))
        asked = {**CHAT, "stream": True}
        streams = []
        for _ in range(4):  # on both, by the fewest connections
            answer = stack.enter_context(client.stream("POST", f"{replicas.url}/v1/chat/completions", json=asked))
            pieces = answer.iter_lines()
            next(pieces)
            streams.append(pieces)
        first, second = replicas.gateways
        replicas.until(lambda: replicas.running(first) and replicas.running(second))
        replicas.gateways[first].send_signal(signal.SIGTERM)
        assert {post(replicas, "chat/completions", CHAT).status_code for _ in range(20)} == {200}
        (replicas.folder / "go").touch()
        for pieces in streams:
            assert [line for line in pieces if line][-1] == "data: [DONE]"
    assert replicas.gateways[first].wait(60) == 0


def test_a_body_that_is_not_whole_reaches_no_gateway(replicas: Any) -> None:
    body = json.dumps(CHAT).encode()
    host, port = replicas.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body[:9])
        assert {post(replicas, "chat/completions", CHAT).status_code for _ in range(9)} == {200}
        assert sum(map(replicas.running, replicas.gateways)) == 0
        connection.sendall(body[9:])
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
