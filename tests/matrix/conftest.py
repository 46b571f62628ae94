"""The gateways of the matrix: all backends behind one, open or with two tenants' keys, patient or in a hurry."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.reasoning.retrieval.knowledge import folder
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.reasoning.settings import IndexSettings, RaLMSpecSettings, SpecReasonSettings
from agentspec.settings.load import CacheSettings, ModelSettings, Settings
from agentspec.settings.server import ApiKey, ServerSettings
from tests.matrix.apis import PATHS, Answer, body_of, read
from tests.matrix.cases import STRATEGIES, Case
from tests.matrix.models import ACCOUNT_KEY, WORDS, Reader, ScriptedModel, Thinker, Upstream

_SPEC = importlib.util.spec_from_file_location("matrix_fixtures", Path(__file__).parents[1] / "proxy" / "conftest.py")
assert _SPEC and _SPEC.loader
_fixtures = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _fixtures
_SPEC.loader.exec_module(_fixtures)
wait_for = _fixtures.wait_for

TENANTS = ("alice", "bob")
LABELS = {"x-agentspec-session": "s1", "x-agentspec-workflow": "w1", "x-agentspec-step": "plan"}
HURRY = 1.0  # seconds that a request may take at the gateway of cases that run into the deadline


@dataclass
class World:
    """One gateway with everything behind it."""

    running: Any
    keys: dict[str, str]
    upstreams: dict[str, Upstream]
    scripted: ScriptedModel
    roles: list[Any]
    client: httpx.Client

    def headers(self, case: Case, tenant: str = TENANTS[0]) -> dict[str, str]:
        headers = dict(LABELS) if case.labels else {}
        headers |= {f"x-agentspec-{name}": "off" for name in ("store", "speculation") if not getattr(case, name)}
        return headers | self.key(tenant)

    def key(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"} if self.keys else {}

    def ask(self, case: Case) -> Answer:
        """The answer to a case, read to its end. An upstream that stalls is left after its first event."""
        url, body = f"{self.running.url}{PATHS[case.api]}", body_of(case, case.backend)
        if case.ending == "disconnect":
            return self._leave(case, url, body)
        with self.client.stream("POST", url, json=body, headers=self.headers(case)) as response:
            content = response.read()
        assert response.headers["x-request-id"]
        return read(case.api, response.status_code, content, stream=case.stream)

    def _leave(self, case: Case, url: str, body: dict[str, Any]) -> Answer:
        """Hang up: a stream after its first event, a whole answer once its request is at work."""
        before = self.begun(case.backend)
        if case.stream and case.backend not in STRATEGIES:
            with self.client.stream("POST", url, json=body, headers=self.headers(case)) as response:
                next(response.iter_raw())
            return Answer(response.status_code)
        with _fixtures.socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) as connection:
            content = json.dumps(body).encode()
            lines = [f"POST {PATHS[case.api]} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
            lines += [f"{name}: {value}" for name, value in self.headers(case).items()]
            head = "\r\n".join([*lines, f"content-length: {len(content)}", "", ""])
            connection.sendall(head.encode() + content)
            wait_for(lambda: self.begun(case.backend) > before)
        return Answer(0)

    def begun(self, backend: str) -> int:
        """How many requests the backend has begun to answer."""
        if backend == "scripted":
            return len(self.scripted.requests)
        if backend in STRATEGIES:
            return sum(len(role.requests) for role in self.roles)
        return sum(len(one.bodies) for one in self.upstreams.values())

    def cancelled(self, backend: str) -> int:
        """How many answers the backend gave up since their client left."""
        if backend == "scripted":
            return self.scripted.cancelled
        if backend in STRATEGIES:
            return sum(len(role.cancelled) for role in self.roles)
        return sum(one.left for one in self.upstreams.values())

    def active(self) -> int:
        """How many answers the scripted roles of strategies are still at."""
        return sum(role.active for role in self.roles)

    def figures(self) -> Counter[tuple[str, ...]]:
        """All samples of the metrics, by their name and the values of their labels."""
        families = self.running.app.metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples]
        return Counter({(sample.name, *sample.labels.values()): sample.value for sample in samples})

    def settled(self) -> Counter[tuple[str, ...]]:
        """The samples once every request is counted, which happens after its last byte was sent."""
        wait_for(lambda: not self.figures()["agentspec_requests_in_flight",])
        return self.figures()

    def stored(self) -> tuple[int, set[str]]:
        """How many tokens the engine's cache holds, and whose."""
        cache = self.running.runtime.cache
        cache.flush()
        return cache.stats().tokens, set(cache.tenant_bytes())

    def get(self, path: str, tenant: str) -> httpx.Response:
        return self.client.get(f"{self.running.url}{path}", headers=self.key(tenant))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = random.Random(1), tmp_path_factory.mktemp("knowledge") / "words"
    folder.build([Document(f"{at:02}", "".join(draw.choices(WORDS, k=8))) for at in range(40)], path, "bm25")
    return path


@contextmanager
def worlds(tiny_model: Path, corpus: Path, path: Path) -> Iterator[Callable[[Case], World]]:
    """The gateway for a case: each kind is started when it is first asked for."""
    made: dict[tuple[bool, bool], World] = {}
    with ExitStack() as stack:

        def of(case: Case) -> World:
            kind = case.keyed, case.ending == "deadline"
            if kind not in made:
                folder = path / "-".join(map(str, kind))
                folder.mkdir()
                made[kind] = _start(stack, tiny_model, corpus, folder, *kind)
            return made[kind]

        yield of


@pytest.fixture(scope="module")
def world(tiny_model: Path, corpus: Path, tmp_path_factory: Any) -> Iterator[Callable[[Case], World]]:
    with worlds(tiny_model, corpus, tmp_path_factory.mktemp("matrix")) as of:
        yield of


def _start(stack: ExitStack, tiny_model: Path, corpus: Path, path: Path, keyed: bool, hurried: bool) -> World:
    scripts = {name: Upstream(native=name == "native") for name in ("upstream", "native", "one", "two")}
    servers = {name: _fixtures.ScriptedUpstream(script) for name, script in scripts.items()}
    keys = {tenant: f"key-of-{tenant}" for tenant in TENANTS} if keyed else {}
    entries = []
    for tenant, key in keys.items():
        (path / tenant).write_text(key)
        entries.append(ApiKey(tenant=tenant, key_file=path / tenant, requests_per_minute=10**6))
    backends: dict[str, Any] = {
        name: OpenAISettings(
            base_url=server.url,
            model="theirs",
            server_kind="vllm",
            probe=False,
            api_key=ACCOUNT_KEY if name != "native" else None,
        )
        for name, server in servers.items()
    }
    names = ("scripted", "small", "large", "reader")
    settings = Settings(
        server=ServerSettings(api_keys=tuple(entries), request_timeout=HURRY if hurried else 300, max_output_tokens=99),
        cache=CacheSettings(path=path / "cache"),
        backends=backends
        | {"local": TorchSettings(model=str(tiny_model), device="cpu", kv_bytes=1 << 24)}
        | {name: TorchSettings(model=name) for name in names},
        models={
            "engine": ModelSettings(backend="local"),
            "strategy": SpecReasonSettings(base="large", small="small"),
            "retrieval": RaLMSpecSettings(base="reader", knowledge="words"),
            "pool": ModelSettings(backends=("one", "two"), placement="round_robin"),
            **{name: ModelSettings(backend=name) for name in ("scripted", "upstream", "native")},
        },
        knowledge={"words": IndexSettings(path=corpus)},
    )
    for server in servers.values():
        stack.callback(server.close)
    scripted, roles = ScriptedModel(), {"small": Thinker(), "large": Thinker(), "reader": Reader()}
    running = stack.enter_context(_fixtures.run_gateway({"scripted": scripted, **roles}, settings))
    client = stack.enter_context(httpx.Client(timeout=300))
    return World(running, keys, scripts, scripted, list(roles.values()), client)
