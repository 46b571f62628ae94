"""A program that streams answers like an engine: `scripted_engine.py HOST PORT LOG NAME MODE`.

It appends `NANOSECONDS EVENT CALL NAME` to LOG: `begin` when a call has arrived, `byte` once its first byte was sent.
Calls are told apart by their field `user`. In the mode `loris` a byte a second is all that comes; `slow` takes five
times as long for a token.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

FIRST_SECONDS, TOKEN_SECONDS, TOKENS = 0.2, 0.05, 20
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": finish}
    return chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


class Engine:
    def __init__(self, log: str, name: str, mode: str) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._name, self._mode = name, mode

    def note(self, what: str, call: str) -> None:
        os.write(self._log, f"{time.monotonic_ns()} {what} {call} {self._name}\n".encode())

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                else:
                    await self.answer(json.loads(body)["user"], writer)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    async def answer(self, call: str, writer: asyncio.StreamWriter) -> None:
        self.note("begin", call)
        await asyncio.sleep(FIRST_SECONDS)
        writer.write(HEAD + event())
        await writer.drain()
        self.note("byte", call)
        for _ in range(TOKENS):
            if self._mode == "loris":
                await asyncio.sleep(1)
                writer.write(chunk(b" "))
            else:
                await asyncio.sleep(TOKEN_SECONDS * (5 if self._mode == "slow" else 1))
                writer.write(event())
            await writer.drain()
        writer.write(event("stop") + chunk(b"data: [DONE]\n\n") + chunk(b""))
        await writer.drain()


async def main(host: str, port: int, log: str, name: str, mode: str) -> None:
    server = await asyncio.start_server(Engine(log, name, mode).connected, host, port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    host, port, log, name, mode = sys.argv[1:]
    asyncio.run(main(host, int(port), log, name, mode))
