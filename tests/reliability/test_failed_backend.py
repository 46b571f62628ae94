"""A local engine whose device failed: /ready says so, its requests are refused with 503, and the process ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.errors import AgentSpecError, EngineStoppedError
from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest

torch = pytest.importorskip("torch")


class Failed(FakeBackend):
    """A backend whose device failed."""

    failure: AgentSpecError | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        if self.failure is not None:
            raise self.failure
        async for delta in super().generate(request):
            yield delta


@pytest.mark.anyio
async def test_ready_depends_on_the_engine_and_its_requests_are_refused_at_once() -> None:
    backend = Failed()
    runtime = Runtime(backends={"local": backend})
    runtime.start()
    transport = httpx.ASGITransport(create_app(runtime))
    body = {"model": "local", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/ready")).status_code == 200
        backend.failure = EngineStoppedError("the engine stopped: AcceleratorError; the process must be restarted")
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "failed"})
        assert (await client.get("/health")).status_code == 200
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_stopped"
    await runtime.aclose()


PROGRAM = """
import sys, threading, time, httpx, torch
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.settings import TorchSettings
from agentspec.proxy.serving import GatewayServer, serve
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings

torch.set_num_threads(1)
startup, port = GatewayServer.startup, [0]


async def started(server, sockets=None):
    await startup(server, sockets)
    port[0] = server.servers[0].sockets[0].getsockname()[1]


def client():
    while not port[0] or httpx.get(f"http://127.0.0.1:{port[0]}/ready").status_code != 200:
        time.sleep(0.05)
    TargetModel.forward_batch = lambda *args: (_ for _ in ()).throw(RuntimeError("CUDA error: illegal address"))
    body = {"model": sys.argv[1], "prompt": [1, 2], "max_tokens": 2}
    answer = httpx.post(f"http://127.0.0.1:{port[0]}/v1/completions", json=body)
    print(answer.status_code, answer.text, flush=True)


GatewayServer.startup = started
threading.Thread(target=client, daemon=True).start()
backends = {"local": TorchSettings(model=sys.argv[1], device="cpu")}
serve(Settings(server=ServerSettings(port=0), backends=backends))
"""


@pytest.mark.slow
def test_the_process_ends_with_an_error_for_its_supervisor(tiny_model: Path, tmp_path: Path) -> None:
    environment: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tiny_model)], **environment)
    said = next(line for line in done.stdout.splitlines() if line.startswith("503"))
    assert json.loads(said[4:])["error"]["code"] == "engine_stopped"
    assert done.returncode == 1 and "EngineStoppedError" in done.stderr
