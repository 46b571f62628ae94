"""The little of HTTP/1.1 that the load client and the scripted upstream speak, and the scripts that they exchange."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PATH = "/v1/chat/completions"
HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"  # no event ends so: an event's last bytes are line feeds
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SCRIPT = re.compile(rb"bench:(\w+):(\d+):([\d.]+)")

ScriptKind = Literal["whole", "placed", "stream", "trickle"]


@dataclass(frozen=True, slots=True)
class Script:
    """What the upstream shall answer; it travels in the request's message, which every gateway passes on.

    `whole` answers one JSON object after `seconds`; `placed` does so too, but holds one of the upstream's places
    meanwhile and waits for it before; `stream` sends `count` events, one every `seconds`; `trickle` sends `count` bytes
    of a JSON object, one every `seconds`.
    """

    kind: ScriptKind = "whole"
    count: int = 0
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return f"bench:{self.kind}:{self.count}:{self.seconds:.6f}"

    @classmethod
    def of(cls, body: bytes) -> Script:
        """The script in the body of a request; the default one if there is none."""
        found = _SCRIPT.search(body)
        if found is None:
            return cls()
        return cls(found[1].decode(), int(found[2]), float(found[3]))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Target:
    """Where the client sends requests: a port of this machine, and the keys that its connections take in turn."""

    port: int
    keys: tuple[str, ...] = ()

    def request(self, script: Script, connection: int = 0) -> bytes:
        """The bytes of a request as the connection of this number sends it."""
        body = json.dumps(
            {
                "model": "bench",
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant. Answer briefly."},
                    {"role": "user", "content": script.text},
                ],
                "max_tokens": 256,
                "temperature": 0,
                **({"stream": True, "stream_options": {"include_usage": True}} if script.kind == "stream" else {}),
            }
        ).encode()
        key = self.keys[connection % len(self.keys)] if self.keys else "none"
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAccept: application/json\r\n"
            f"User-Agent: agentspec-bench\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def content_length(head: bytes) -> int | None:
    """The Content-Length of a head; None if there is none."""
    found = _LENGTH.search(head)
    return int(found[1]) if found else None


def processor_seconds() -> float:
    """Processor time that this process has used, in user and system mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the values lie, by the nearest rank; None of no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def summary(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p99 and the maximum in seconds."""
    return {"p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99), "max": max(seconds, default=None)}
