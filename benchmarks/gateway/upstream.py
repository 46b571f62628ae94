"""The scripted upstream, a process of its own: answers each request as the script in its message says.

Run as `python -m agentspec.benchmarks.gateway.upstream PLACES`. Writes its port as the first line; each line that it
reads is answered with its processor time and the number of requests; the end of its input ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from typing import cast

import uvloop

from agentspec.benchmarks.gateway.wire import HEAD_END, LAST_CHUNK, Script, content_length, processor_seconds

_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ANSWER = json.dumps(
    {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1,
        "model": "bench",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "word " * 40}, "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 24, "completion_tokens": 40, "total_tokens": 64},
    }
).encode()
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"vllm"}]}'
_CHUNK = '{"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"bench","choices":[%s]%s}'
_WORD = _CHUNK % ('{"index":0,"delta":{"content":" %.6f"},"logprobs":null,"finish_reason":null}', "")
_LAST = _CHUNK % ('{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}', "")
_USAGE = _CHUNK % ("", ',"usage":{"prompt_tokens":24,"completion_tokens":40,"total_tokens":64}')


class Places:
    """The requests that the upstream works on at once; further ones wait in order."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[UpstreamConnection] = deque()

    def take(self, connection: UpstreamConnection) -> None:
        if self._free:
            self._free -= 1
            connection.begin()
        else:
            self._waiting.append(connection)

    def leave(self) -> None:
        self._free += 1
        while self._waiting and self._free:
            connection = self._waiting.popleft()
            if connection.waits:
                self._free -= 1
                connection.begin()


class UpstreamConnection(asyncio.Protocol):
    """One connection of the gateway: a request at a time, answered by timers."""

    requests = 0

    def __init__(self, places: Places) -> None:
        self._places = places
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._script = Script()
        self._timer: asyncio.TimerHandle | None = None
        self._sent = 0
        self._holds_place = False
        self.waits = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waits = False
        if self._timer is not None:
            self._timer.cancel()
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(HEAD_END)
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        whole = end + len(HEAD_END) + (content_length(head) or 0)
        if len(self._buffer) < whole:
            return
        body = bytes(self._buffer[end + len(HEAD_END) : whole])
        del self._buffer[:whole]
        if head.startswith(b"GET "):
            self._transport.write(_JSON % (len(_MODELS), _MODELS))
        else:
            UpstreamConnection.requests += 1
            self._answer(Script.of(body))

    def _answer(self, script: Script) -> None:
        self._script, self._sent = script, 0
        if script.kind == "placed":
            self.waits = True
            self._places.take(self)
        elif script.kind == "whole" and not script.seconds:
            self._finish()
        else:
            self.begin()

    def begin(self) -> None:
        """Start to work on the request."""
        self.waits, self._holds_place = False, self._script.kind == "placed"
        self._started = self._loop.time()
        if self._script.kind == "stream":
            self._transport.write(_STREAM)
            self._event()
        elif self._script.kind == "trickle":
            self._transport.write(_JSON % (self._script.count, b""))
            self._byte()
        else:
            self._timer = self._loop.call_later(self._script.seconds, self._finish)

    def _finish(self) -> None:
        self._leave()
        self._transport.write(_JSON % (len(_ANSWER), _ANSWER))

    def _leave(self) -> None:
        if self._holds_place:
            self._holds_place = False
            self._places.leave()

    def _event(self) -> None:
        if self._sent == self._script.count:
            self._transport.write(_chunk(_LAST) + _chunk(_USAGE) + _chunk("[DONE]") + LAST_CHUNK)
            return
        self._transport.write(_chunk(_WORD % time.monotonic()))
        self._again(self._event)

    def _byte(self) -> None:
        if self._sent < self._script.count:
            self._transport.write(b" " if self._sent else b"1")
            self._again(self._byte)

    def _again(self, action: object) -> None:
        self._sent += 1
        self._timer = self._loop.call_at(self._started + self._sent * self._script.seconds, action)  # type: ignore[arg-type]


def _chunk(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


async def main(places: int) -> None:
    loop = asyncio.get_running_loop()
    shared = Places(places)
    server = await loop.create_server(lambda: UpstreamConnection(shared), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        while await loop.run_in_executor(None, sys.stdin.readline):
            answer = {"processor": processor_seconds(), "requests": UpstreamConnection.requests}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
