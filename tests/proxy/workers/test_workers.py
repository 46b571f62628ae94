"""Two workers in front of a scripted upstream: what holds for one process holds for both together."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

COMPLETIONS = "/v1/chat/completions"
ANSWER = json.dumps(
    {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
).encode()
KEYS = {"heavy": "canary-heavy", "light": "canary-light"}
PLACES = 4
CONFIGURATION = f"""
[server]
workers = 2
max_concurrent = {PLACES}
queue_timeout = 300
max_queued = 1000
drain_timeout = 300
[server.tenants.heavy]
weight = 3.0
[[server.api_keys]]
tenant = "heavy"
key_file = "heavy"
[[server.api_keys]]
tenant = "light"
key_file = "light"
[[server.api_keys]]
role = "operator"
key_file = "operator"
[cache]
store = false
[backends.up]
kind = "openai"
vllm = "on"
base_url = "URL"
"""


def body(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": content}], **fields}


@dataclass
class Held:
    """An upstream that answers "hold" when it is let, and counts what it works on at once."""

    now: int = 0
    most: int = 0
    order: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    waiting: list[threading.Event] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Any) -> None:
        if request.method != "POST":
            request.answer(b"{}", 404)
            return
        asked = request.json
        content = asked["messages"][0]["content"]
        with self.lock:
            self.bodies.append(asked)
            self.now += 1
            self.most = max(self.most, self.now)
            self.order.append(content)
            let = threading.Event()
            if "hold" in content:
                self.waiting.append(let)
        if "hold" in content:
            request.connection.settimeout(300)
            while not let.wait(0.02):
                if request.client_left(0.001):
                    break
        with self.lock:
            self.now -= 1
        request.answer(ANSWER)

    def let_go(self, count: int = 1) -> None:
        with self.lock:
            going, self.waiting = self.waiting[:count], self.waiting[count:]
        for one in going:
            one.set()


@pytest.fixture(scope="module")
def upstream_program() -> Held:
    return Held()


@pytest.fixture(scope="module")
def gateway(shared_workers: Any, shared_upstream: Any, upstream_program: Held, tmp_path_factory: Any) -> Any:
    keys = tmp_path_factory.mktemp("keys")
    for name, key in {**KEYS, "operator": "canary-operator"}.items():
        (keys / name).write_text(key)
    text = re.sub(r'key_file = "(\w+)"', rf'key_file = "{keys}/\1"', CONFIGURATION)
    started = shared_workers(text.replace("URL", shared_upstream(upstream_program).url))
    started.keys = keys
    return started.ready()


def metric(client: httpx.Client, name: str) -> float:
    """The sum of the samples of a metric."""
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def counted(client: httpx.Client, name: str) -> float:
    """The same once every request is counted, which happens after its last byte was sent."""
    wait_for(lambda: metric(client, "agentspec_requests_in_flight") == 1)  # the scrape itself
    return metric(client, name)


def wait_for(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)


def test_both_workers_answer_with_one_salt_and_one_sum(gateway: Any, upstream_program: Held) -> None:
    before = len(upstream_program.bodies)
    with gateway.clients(4, KEYS["heavy"]) as clients, gateway.clients(2, "canary-operator") as operators:
        for number, client in enumerate(clients * 2):
            answer = client.post(COMPLETIONS, json=body(), headers={"x-request-id": f"sum-{number}"})
            assert (answer.status_code, answer.content) == (200, ANSWER)
            assert answer.headers["x-request-id"] == f"sum-{number}"
        assert clients[0].get("/metrics").status_code == 403
        assert {client.get("/ready").text for client in clients} == {'{"status":"ready"}'}
        assert [counted(operator, "agentspec_completion_tokens_total") for operator in operators] == [16, 16]
    served = Counter(line["worker"] for line in gateway.said("request", 8, route=COMPLETIONS))
    assert served == {1: 4, 2: 4}
    salts = {asked["cache_salt"] for asked in upstream_program.bodies[before:]}
    assert len(salts) == 1 and len(salts.pop()) == 64
    assert len(gateway.said("running on")) == 1


def test_places_hold_across_workers(gateway: Any, upstream_program: Held) -> None:
    upstream_program.most = 0
    with gateway.clients(12, KEYS["heavy"]) as clients, ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(client.post, COMPLETIONS, json=body("hold")) for client in clients]
        for _ in range(3):
            wait_for(lambda: len(upstream_program.waiting) == PLACES)
            upstream_program.let_go(PLACES)
        assert {answer.result().status_code for answer in answers} == {200}
    assert upstream_program.most == PLACES


def test_weights_hold_across_workers(gateway: Any, upstream_program: Held) -> None:
    """Both tenants always have requests in line on both workers, and places come free one by one.

    `test_places.py` counts the shares to the place: here how long each place is held is up to a busy machine.
    """
    each, observed = 20, 24
    with (
        gateway.clients(each, KEYS["heavy"]) as heavy,
        gateway.clients(each, KEYS["light"]) as light,
        gateway.client("canary-operator") as operator,
        ThreadPoolExecutor(2 * each) as pool,
    ):
        for number, pair in enumerate(zip(heavy, light, strict=True)):
            for name, client in zip(("heavy", "light"), pair, strict=True):
                pool.submit(client.post, COMPLETIONS, json=body(f"hold {name}"))
            if 2 * number + 2 == PLACES:  # both tenants hold places for equally long, which decides what one costs
                wait_for(lambda: len(upstream_program.waiting) == PLACES)
        wait_for(lambda: metric(operator, "agentspec_tenant_waiting") == 2 * each - PLACES)
        upstream_program.order.clear()
        for number in range(2 * each):
            wait_for(lambda: len(upstream_program.waiting) == min(PLACES, 2 * each - number))  # noqa: B023
            upstream_program.let_go()
    shares = Counter(upstream_program.order[:observed])
    assert shares["hold heavy"] > shares["hold light"] > 0, shares


def test_a_reload_reaches_every_worker(gateway: Any) -> None:
    def statuses() -> set[int]:
        return {client.get("/version").status_code for client in clients}

    with gateway.clients(4, "canary-new") as clients:
        assert statuses() == {401}
        (gateway.keys / "light").write_text("canary-new")
        gateway.process.send_signal(signal.SIGHUP)
        gateway.said("configuration reloaded", 3)
        assert statuses() == {200}
        gateway.file.write_text("[server")
        gateway.process.send_signal(signal.SIGHUP)
        gateway.said("configuration not reloaded")
        assert statuses() == {200}


def test_a_killed_worker_is_replaced_and_its_places_return(gateway: Any, upstream_program: Held) -> None:
    """All places are held by requests of one worker, which is killed: those of the other get them."""
    first, second = gateway.pid(1), gateway.pid(2)
    on: dict[int, list[httpx.Client]] = {1: [], 2: []}
    with (
        gateway.clients(2 * PLACES, KEYS["heavy"]) as clients,
        gateway.client("canary-operator") as operator,
        ThreadPoolExecutor(2 * PLACES) as pool,
    ):
        for number, client in enumerate(clients):
            client.get("/version", headers={"x-request-id": f"where-{number}"})
            on[gateway.said("request", request_id=f"where-{number}")[0]["worker"]].append(client)
        before = counted(operator, "agentspec_completion_tokens_total")
        lost = [pool.submit(client.post, COMPLETIONS, json=body("hold")) for client in on[1]]
        wait_for(lambda: len(upstream_program.waiting) == PLACES)
        kept = [pool.submit(client.post, COMPLETIONS, json=body()) for client in on[2][:2]]
        wait_for(lambda: upstream_program.now == PLACES and _waiting(gateway) == 2)
        os.kill(first, signal.SIGKILL)
        assert [one.result().status_code for one in kept] == [200, 200]  # the places have come back
        assert all(isinstance(one.exception(), httpx.TransportError) for one in lost)
    gateway.said("process ended", process="1", status=-signal.SIGKILL)
    wait_for(lambda: gateway.pid(1) != first)
    assert gateway.pid(2) == second
    gateway.said("ready", 2, worker=1)
    with gateway.clients(2, "canary-operator") as operators:
        totals = [counted(operator, "agentspec_completion_tokens_total") for operator in operators]
    assert totals[0] == totals[1] >= before + 4


def _waiting(gateway: Any) -> float:
    with gateway.client("canary-operator") as operator:
        return metric(operator, "agentspec_tenant_waiting")
