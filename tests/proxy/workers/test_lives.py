"""The lives of the processes: drains, deaths at start and later, connections that wait for a worker that dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/chat/completions"
BODY = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "stream": True}
CONFIGURATION = """
[server]
workers = 2
drain_timeout = {drain}
{more}
[backends.up]
kind = "openai"
base_url = "{url}"
"""


class Streaming:
    """An upstream whose streams have a first event, and a last one once they are let."""

    def __init__(self) -> None:
        self.let = threading.Event()

    def __call__(self, request: Any) -> None:
        if request.method != "POST":
            request.answer(b"{}", 404)
            return
        request.head()
        chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
        request.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.let.wait(300)
        chunk["choices"][0]["finish_reason"] = "stop"  # type: ignore[index]
        request.send(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")


def begin(pool: ThreadPoolExecutor, gateway: Any, into: list[str]) -> Any:
    """A stream whose lines go into a list; returns once its first event is there."""
    begun = threading.Event()

    def read() -> None:
        with gateway.client() as client, client.stream("POST", COMPLETIONS, json=BODY) as response:
            for line in response.iter_lines():
                into.append(line)
                begun.set()

    result = pool.submit(read)
    assert begun.wait(300)
    return result


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_drain_lets_streams_end_on_every_worker(start_workers: Any, upstream: Any, until: Any, sent: Any) -> None:
    program = Streaming()
    gateway = start_workers(CONFIGURATION.format(url=upstream(program).url, drain=300, more="")).ready()
    streams: list[list[str]] = [[], []]
    with ThreadPoolExecutor(2) as pool, gateway.clients(2) as idle:
        results = [begin(pool, gateway, into) for into in streams]
        gateway.process.send_signal(sent)
        for number in (1, 2):  # as a service manager does, which signals every process
            os.kill(gateway.pid(number), sent)
        until(lambda: {client.get("/ready").status_code for client in idle} == {503}, 300)
        refused = idle[0].post(COMPLETIONS, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        with gateway.client() as new:
            assert new.get("/ready").json() == {"status": "draining"}
        program.let.set()
        for result in results:
            result.result()
    assert gateway.process.wait(300) == 0
    assert all(lines[-2:] == ["data: [DONE]", ""] and "error" not in "".join(lines) for lines in streams)


def test_a_drain_has_an_end(start_workers: Any, upstream: Any) -> None:
    program = Streaming()
    gateway = start_workers(CONFIGURATION.format(url=upstream(program).url, drain=0.3, more="")).ready()
    lines: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        result = begin(pool, gateway, lines)
        assert gateway.end() == 0
        result.result()
        program.let.set()
    assert '"code":"shutting_down"' in "".join(lines)


def test_a_worker_that_is_told_to_end_is_replaced(start_workers: Any, upstream: Any, until: Any) -> None:
    program = Streaming()
    gateway = start_workers(CONFIGURATION.format(url=upstream(program).url, drain=300, more="")).ready()
    before = gateway.pid(1)
    lines: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        result = begin(pool, gateway, lines)
        for number in (1, 2):
            os.kill(gateway.pid(number), signal.SIGTERM)
        until(lambda: gateway.pid(1) != before or gateway.pid(2) != before, 300)
        program.let.set()
        result.result()
    assert lines[-2:] == ["data: [DONE]", ""]
    gateway.said("ready", 2, worker=1)
    gateway.said("ready", 2, worker=2)
    with gateway.clients(2) as clients:
        assert {client.get("/ready").status_code for client in clients} == {200}


def test_a_connection_that_waits_for_a_worker_outlives_it(start_workers: Any, upstream: Any, until: Any) -> None:
    gateway = start_workers(CONFIGURATION.format(url=upstream(Streaming()).url, drain=1, more="")).ready()
    stopped = gateway.pid(1)
    os.kill(stopped, signal.SIGSTOP)

    def health() -> int:
        with gateway.client() as client:
            return int(client.get("/health").status_code)

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(health) for _ in range(6)]
        until(lambda: sum(answer.done() for answer in answers) >= 3, 300)  # half of them go to the other worker
        assert not all(answer.done() for answer in answers)
        os.kill(stopped, signal.SIGKILL)
        assert [answer.result() for answer in answers] == [200] * 6


@pytest.mark.parametrize("name", [1, pytest.param("engine", marks=pytest.mark.long)])
def test_a_process_that_hangs_is_killed_and_replaced(start_workers: Any, upstream: Any, name: Any) -> None:
    """Its connections break, those that wait for it go to the other worker, and its places are free again."""
    more = "hang_timeout = 8\nmax_concurrent = 2\nqueue_timeout = 300"
    program = Streaming()
    gateway = start_workers(CONFIGURATION.format(url=upstream(program).url, drain=1, more=more)).ready()
    gateway.said("ready", worker="engine")
    before, other = gateway.pid(name), gateway.pid(2)
    lines: list[list[str]] = [[], []]
    with ThreadPoolExecutor(8) as pool:
        begun = [begin(pool, gateway, into) for into in lines]  # one on each worker; both places are taken
        os.kill(before, signal.SIGSTOP)

        def health() -> int:
            with gateway.client() as client:
                return int(client.get("/health").status_code)

        answers = [pool.submit(health) for _ in range(4)]
        gateway.said("process does not answer and is killed", process=str(name))
        gateway.said("process ended", process=str(name), status=-signal.SIGKILL)
        assert [answer.result() for answer in answers] == [200] * 4
        if name == 1:
            third: list[str] = []
            begun.append(begin(pool, gateway, third))  # takes the place that has come back
        program.let.set()
        ended = [result.exception() for result in begun]
    assert sum(error is not None for error in ended) == (1 if name == 1 else 0)
    assert all(isinstance(error, httpx.TransportError) for error in ended if error)
    assert gateway.pid(2) == other
    gateway.said("ready", 2, worker=name)
    with gateway.client() as client:
        assert client.get("/ready").status_code == 200
    assert gateway.end() == 0


def test_an_engine_that_never_loads_is_killed_and_replaced(start_workers: Any, upstream: Any, tmp_path: Path) -> None:
    """It lives and answers, but its model does not come: here from a file that nobody writes."""
    program = Streaming()
    program.let.set()
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    os.mkfifo(folder / "model.safetensors")
    local = f'[backends.local]\nkind = "torch"\nmodel = "{folder}"\n[models.m]\nbackend = "local"'
    more = f'load_timeout = 8\n{local}\n[models.any]\nbackend = "up"'
    gateway = start_workers(CONFIGURATION.format(url=upstream(program).url, drain=1, more=more))
    for name in (1, 2):
        gateway.said("ready", worker=name)
    before = gateway.pid("engine")
    gateway.said("has not loaded in time", process="engine", seconds=8.0)
    gateway.said("process ended", process="engine", status=-signal.SIGKILL)
    with gateway.client() as client:
        assert client.post(COMPLETIONS, json=BODY).status_code == 200  # upstreams go on
        assert client.get("/ready").status_code == 503
    gateway.said("process started", 2, worker="engine")
    assert gateway.pid("engine") != before


def test_a_stop_of_all_processes_ends_none(start_workers: Any, upstream: Any) -> None:
    """As of a terminal, or of a machine that sleeps."""
    more = "hang_timeout = 8"  # long enough for a busy machine
    gateway = start_workers(CONFIGURATION.format(url=upstream(Streaming()).url, drain=1, more=more)).ready()
    pids = [gateway.process.pid, *(gateway.pid(name) for name in ("engine", 1, 2))]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(9)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    with gateway.clients(4) as clients:
        assert {client.get("/health").status_code for client in clients} == {200}
    assert not [line for line in gateway.lines if line["event"] == "process ended"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_https_is_served_by_every_worker(start_workers: Any, upstream: Any, tmp_path: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x"
    command += " -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out chain.pem"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    more = f'tls_cert_file = "{tmp_path}/chain.pem"\ntls_key_file = "{tmp_path}/key.pem"'
    gateway = start_workers(CONFIGURATION.format(url=upstream(Streaming()).url, drain=1, more=more)).ready()
    trusted = ssl.create_default_context(cafile=str(tmp_path / "chain.pem"))
    assert gateway.url.startswith("https://")
    with gateway.clients(4, verify=trusted) as clients:
        for number, client in enumerate(clients):
            answer = client.get("/ready", headers={"x-request-id": f"tls-{number}"})
            assert answer.status_code == 200
        served = {gateway.said("request", request_id=f"tls-{number}")[0]["worker"] for number in range(4)}
    assert served == {1, 2}
    (tmp_path / "chain.pem").write_text("nonsense")
    gateway.process.send_signal(signal.SIGHUP)
    gateway.said("configuration not reloaded")


@pytest.mark.parametrize("limit", ["max_connections = 17", "max_connections_per_address = 17"])
def test_connections_are_counted_over_all_workers(start_workers: Any, upstream: Any, limit: str) -> None:
    gateway = start_workers(CONFIGURATION.format(url=upstream(Streaming()).url, drain=1, more=limit)).ready()
    with gateway.clients(17) as clients:
        with gateway.client() as refused, refused.stream("GET", "/health") as answer:
            assert answer.status_code == 503
        text = clients[0].get("/metrics").text
        assert "agentspec_connections 17.0" in text and 'ended_total{reason="refused"} 1.0' in text
    deadline = time.monotonic() + 300
    while True:  # the others are closed now, and that is known soon
        with gateway.client() as client:
            if client.get("/health").status_code == 200:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_stored_responses_of_upstreams_are_those_of_every_worker(start_workers: Any, upstream: Any) -> None:
    def program(request: Any) -> None:
        message = {"role": "assistant", "content": "hi"}
        answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        chat = request.target.endswith("/chat/completions")
        request.answer(json.dumps(answer).encode() if chat else b"{}", 200 if chat else 404)

    gateway = start_workers(CONFIGURATION.format(url=upstream(program).url, drain=1, more="")).ready()
    gateway.said("ready", worker="engine")  # the process that keeps them
    with gateway.clients(2) as (one, other):
        answer = one.post("/v1/responses", json={"model": "any", "input": "hi"})
        assert answer.status_code == 200 and answer.json()["store"] is True, answer.text
        path = f"/v1/responses/{answer.json()['id']}"
        assert other.get(path).json() == answer.json()
        assert other.get(f"{path}/input_items").json()["data"][0]["content"][0]["text"] == "hi"
        os.kill(gateway.pid("engine"), signal.SIGSTOP)
        assert one.get("/health").status_code == 200
        os.kill(gateway.pid("engine"), signal.SIGCONT)
        assert other.delete(path).status_code == 200
        assert one.get(path).status_code == 404
    assert gateway.end() == 0


@pytest.mark.long
def test_what_a_worker_reports_at_its_start_ends_serve(start_workers: Any, tmp_path: Path) -> None:
    missing = f'base_url = "http://127.0.0.1:9/v1"\napi_key_file = "{tmp_path}/none"\n'
    text = CONFIGURATION.format(url="x", drain=1, more="").replace('base_url = "x"', missing)
    gateway = start_workers(text)
    assert gateway.process.wait(300) == 2
    last = gateway.log.read_text().splitlines()[-1]
    assert last.startswith("agentspec: cannot read api_key_file") and "Traceback" not in gateway.log.read_text()


def test_a_process_that_ends_again_and_again_at_its_start_ends_serve() -> None:
    program = """
import sys
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import AgentSpecError
from agentspec.proxy.workers import child, supervisor
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
child.FIRST_DELAY = child.LONGEST_DELAY = 0.01
child.WORKER = supervisor.WORKER = "this"  # a module that has no main
up = OpenAISettings(base_url="http://127.0.0.1:9/v1")
try:
    supervisor.serve(Settings(server=ServerSettings(port=0, workers=2), backends={"up": up}))
except AgentSpecError as error:
    print("error:", type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "ended 5 times at its start, the last time with status 1" in done.stdout, done


def test_the_workers_end_with_the_parent(start_workers: Any, upstream: Any, until: Any) -> None:
    gateway = start_workers(CONFIGURATION.format(url=upstream(Streaming()).url, drain=300, more="")).ready()
    pids = [gateway.pid(1), gateway.pid(2)]
    gateway.process.kill()
    gateway.process.wait()

    def over() -> bool:
        return not any(
            Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids
        )

    until(over, 300)
    with pytest.raises(httpx.TransportError):
        gateway.client().get("/health")
