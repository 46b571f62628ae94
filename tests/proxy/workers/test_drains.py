"""What a drain tells the gateway's other processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.routing import Route

from agentspec.proxy.fleet import FleetPages
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings


def test_other_processes_hear_of_a_backend_and_of_its_members(tmp_path: Path) -> None:
    """They may not have found all of these yet."""
    told: list[tuple[str, bool]] = []
    backend = {"kind": "openai", "base_urls": ["http://a:1/v1", "http://b:1/v1"], "vllm": "off", "sglang": "off"}
    runtime = Runtime(Settings.model_validate({"backends": {"s": backend}, "cache": {"path": str(tmp_path / "c")}}))
    runtime.start()

    async def metrics() -> bytes:
        return b""

    pages = FleetPages(runtime, lambda name, on: told.append((name, on)), metrics)
    app = Starlette(routes=[Route("/drain", pages.drain, methods=["POST"])])

    async def main() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client, runtime:
            assert (await client.post("/drain", json={"name": "s"})).status_code == 200

    asyncio.run(main())
    assert told == [("s", True), ("s/a:1", True), ("s/b:1", True)]
