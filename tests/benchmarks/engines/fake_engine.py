"""A stand-in for an inference server: it answers each prompt with its words, in steps of as many as are told."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARGUMENTS = sys.argv[3:]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._reply("ok")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = f"echo: {asked['messages'][0]['content']}".split()[: asked["max_tokens"]]
        wide = _drafted(asked["messages"][0]["content"])
        chunks = [" ".join(words[at : at + wide]) for at in range(0, len(words), wide)]
        events: list[object] = [{"choices": [{"delta": {"content": f"{chunk} "}}]} for chunk in chunks]
        events.append({"choices": [], "usage": {"completion_tokens": len(words)}})
        self._reply("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


def _drafted(prompt: str) -> int:
    """Words in a step: three if this cache, which outlives the server, has seen the prompt."""
    cache = os.environ.get("AGENTSPEC_CACHE_PATH")
    if not ARGUMENTS or cache is None:
        return 1
    seen = Path(cache) / str(len(prompt))
    known = seen.exists()
    seen.parent.mkdir(parents=True, exist_ok=True)
    seen.touch()
    return 3 if known else 1


if os.environ.get("AGENTSPEC_VLLM") == "off" and any('"suffix"' in word for word in ARGUMENTS):
    sys.exit("Arctic Inference is not installed")
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
