"""A gateway over a tiny model, which is sent forms one after another.

As a program it does so in a process of its own: if a form ends that, the test that started it fails and lives on.
Usage: form_cases.py MODEL_FOLDER EXAMPLES < CASES, a JSON object of bodies by name. First, EXAMPLES forms are grown and
tried without a gateway.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import form_fuzz  # beside this program
import httpx

from agentspec.backends.settings import TorchSettings
from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings


async def outcomes(folder: str, cases: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    settings = Settings(
        server=ServerSettings(request_timeout=120),
        backends={"local": TorchSettings(model=folder, device="cpu")},
        models={"tiny": ModelSettings(backend="local")},
    )
    async with Runtime(settings) as runtime:
        app = create_app(runtime, settings)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client:
            for name, fields in cases.items():
                yield await tried(client, name, fields)


async def tried(client: httpx.AsyncClient, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What a case was answered, the processor time of the event loop meanwhile, and the growth of this process."""
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    body = {"model": "tiny", "max_tokens": 8, **fields}
    body.pop("raw", None)
    if path.endswith("chat/completions"):
        body = {"messages": [{"role": "user", "content": "x"}], **body}
    before, started, clock = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time(), time.monotonic()
    content = json.dumps(body).replace('"RAW"', fields.get("raw", ""))
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    loop = time.thread_time() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "name": name,
        "status": response.status_code,
        "loop": loop,
        "grown": grown,
        "seconds": time.monotonic() - clock,
        "text": response.text[:3000],
    }


async def main(folder: str, cases: dict[str, Any]) -> None:
    async for outcome in outcomes(folder, cases):
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    read = json.loads(sys.stdin.read())
    print(json.dumps({"grown": form_fuzz.grow_forms(int(sys.argv[2]))}))
    asyncio.run(main(sys.argv[1], read))
