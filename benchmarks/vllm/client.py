"""A client of an inference server, and the parts of a comparison: prompts in turn or at once, cold and warm."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from agentspec.benchmarks.vllm.process import ServerProcess

MAX_TOKENS = 512
COLD, WARM, RESTARTED, TOGETHER = "cold", "warm", "after restart", "8 at once"
CLIENTS = 8


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """One answer as the client received it."""

    text: str
    tokens: int
    steps: int
    seconds: float


def ask(
    server: ServerProcess,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    timeout: float = 600.0,
    **more: Any,
) -> ClientAnswer:
    """Stream one chat answer. Raises `urllib.error.URLError` if the server does not answer."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    pieces: list[str] = []
    steps = tokens = 0
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage")
            tokens = usage["completion_tokens"] if usage else tokens
            for choice in chunk["choices"]:
                steps += "role" not in choice["delta"] or bool(choice["delta"].get("content"))
                pieces.append(choice["delta"].get("content") or "")
    return ClientAnswer("".join(pieces), tokens, max(1, steps), time.perf_counter() - started)
