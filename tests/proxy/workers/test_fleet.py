"""Pools behind a gateway of two workers: a drain and a reload reach both, and whoever is started later."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = b'{"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}'
CONFIGURATION = """
[server]
workers = 2
[cache]
store = false
[backends.up]
kind = "openai"
vllm = "off"
sglang = "off"
probe = false
base_urls = {urls}
[models.m]
backend = "up"
placement = "round_robin"
"""


def answers(server: Any, clients: list[httpx.Client], count: int = 8) -> int:
    """How many of these calls, in turn on both workers' connections, the server got."""
    before = len(server.requests)
    for number in range(count):
        assert clients[number % len(clients)].post(CHAT, json=BODY).status_code == 200
    return len(server.requests) - before


def configuration(*servers: Any) -> str:
    return CONFIGURATION.format(urls=json.dumps([server.url for server in servers]))


@pytest.fixture
def servers(upstream: Any) -> Any:
    return [upstream(lambda request: request.answer(ANSWER)) for _ in range(2)]


def test_a_drain_reaches_both_workers_and_the_one_started_later(start_workers: Any, servers: Any, until: Any) -> None:
    gateway = start_workers(configuration(*servers)).ready()
    name = servers[0].url.removeprefix("http://").removesuffix("/v1")
    with gateway.clients(4) as clients:
        assert answers(servers[0], clients) == 4
        members = clients[0].get("/fleet").json()["members"]
        assert [(one["calls"], one["in_flight"]) for one in members] == [(4, 0), (4, 0)]  # of both workers
        assert clients[0].post("/fleet/drain", json={"name": f"up/{name}"}).json() == {"drained": [f"up/{name}"]}
        until(lambda: all(drained(client) for client in clients))
        assert answers(servers[0], clients) == 0
    os.kill(gateway.pid(1), signal.SIGKILL)
    gateway.said("process started", times=3)
    gateway.said("ready", times=2)
    with gateway.clients(4) as clients:
        until(lambda: all(drained(client) for client in clients))
        assert answers(servers[0], clients) == 0
        clients[0].post("/fleet/resume", json={"name": "up"})
        until(lambda: not any(drained(client) for client in clients))
        assert answers(servers[0], clients) == 4


def test_sighup_changes_the_servers_of_both_workers(start_workers: Any, servers: Any, until: Any) -> None:
    gateway = start_workers(configuration(servers[0])).ready()
    with gateway.clients(4) as clients:
        assert answers(servers[0], clients) == 8
        gateway.file.write_text(configuration(servers[1]))
        gateway.process.send_signal(signal.SIGHUP)
        gateway.said("configuration reloaded", needs_restart=[])
        until(lambda: all(servers[1].url[7:-3] in str(client.get("/fleet").json()) for client in clients))
        assert answers(servers[1], clients) == 8


def drained(client: httpx.Client) -> list[str]:
    members = client.get("/fleet").json()["members"]
    return [one["member"] for one in members if one["state"] == "draining"]
