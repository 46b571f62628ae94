"""The hot path, through the official OpenAI client and through curl, over a real socket."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

import anyio
import httpx

from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest

MODEL = "fake"
HELLO: list[Any] = [{"role": "user", "content": "hello there"}]


class Held(FakeBackend):
    """Begins its answer, and goes on once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    async def generate(self, request: GenerateRequest) -> Any:
        yield Delta(text="one")
        while not self.go.is_set():
            await anyio.sleep(0.005)
        yield Delta(text=" two", finish_reason="stop")


def test_curl_streams_as_tokens_come(gateway: Any) -> None:
    held = Held()
    running = gateway({MODEL: held})
    body = json.dumps({"model": MODEL, "messages": HELLO, "stream": True})
    command = ["curl", "-sN", f"{running.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        first = next(line for line in process.stdout if "one" in line)
        assert not held.go.is_set()
        held.go.set()
        lines = [first, *(line for line in process.stdout if line.strip())]
    assert [line[:6] for line in lines] == ["data: "] * len(lines) and lines[-1] == "data: [DONE]\n"


def test_a_name_that_a_client_has_built_in_is_served(gateway: Any) -> None:
    from agentspec.settings.load import Settings

    fake = FakeBackend("ok")
    running = gateway({MODEL: fake}, Settings(backends={}, model_aliases={"gpt-5": MODEL, "claude-*": MODEL}))
    for name, path in (("gpt-5", "chat/completions"), ("claude-haiku-4-5", "messages")):
        asked = {"model": name, "max_tokens": 5, "messages": HELLO}
        answer = httpx.post(f"{running.url}/v1/{path}", json=asked).json()
        assert answer["model"] == name
    assert running.metric("agentspec_requests_total", route="/v1/messages", model=MODEL, outcome="ok") == 1
    listed = httpx.get(f"{running.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [MODEL, "gpt-5"]
    assert httpx.get(f"{running.url}/v1/models/gpt-5").status_code == 200
