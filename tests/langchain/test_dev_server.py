"""`AgentSpecMiddleware` under `langgraph dev`: a real server, asked through its HTTP API."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

sdk = pytest.importorskip("langgraph_sdk")

AGENT = Path(__file__).with_name("dev_agent.py")
ENVIRONMENT = Path(os.environ.get("AGENTSPEC_LANGGRAPH_ENV") or AGENT.parents[2] / ".venv-langgraph")
SERVER = ENVIRONMENT / "bin" / "langgraph"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not SERVER.exists(), reason="no langgraph-cli[inmem]: run .ci/langgraph-env, or set AGENTSPEC_LANGGRAPH_ENV"
    ),
]


@contextmanager
def served(folder: Path, model: str) -> Iterator[Any]:
    """A client of `langgraph dev`, which keeps its threads in the folder."""
    (folder / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": {"shop": f"{AGENT}:graph"}}))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    command = [str(SERVER), "dev", "--no-browser", "--no-reload", "--port", str(port)]
    environment = {"DEV_AGENT_FOLDER": str(folder), "DEV_AGENT_URL": model, "LANGSMITH_TRACING": "false"}
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, process, folder / "log")
        with sdk.get_sync_client(url=url) as client:
            yield client
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/ok").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(log.read_text()[-4000:])


def ask(client: Any, order: str) -> tuple[str, Any]:
    """(id, messages) of a new thread with one question."""
    thread = client.threads.create()["thread_id"]
    said = {"messages": [{"role": "user", "content": f"look at '{order}', please"}]}
    return thread, client.runs.wait(thread, "shop", input=said)["messages"]


def outcomes(folder: Path, thread: str) -> list[str]:
    """What the audit log says of a thread."""
    return re.findall(rf"^(\w+) .*session={thread} ", (folder / "audit").read_text(), re.M)


def test_labels_early_starts_and_replays(server: Any, tmp_path: Path) -> None:
    with served(tmp_path, server.base_url) as client:
        for number in range(7):
            ask(client, f"#W{number}")
        first, messages = ask(client, "#W7")
        shown = [message["content"] for message in messages]
        assert shown[1:] == ["", "#W7 is on its way", "a plain answer to it"]
        assert "hit" in outcomes(tmp_path, first)
        names = ("x-agentspec-workflow", "x-agentspec-step", "x-agentspec-session")
        assert [tuple(map(sent.get, names)) for sent in server.request_headers[-2:]] == [("shop", "model", first)] * 2
    with served(tmp_path, server.base_url) as client:  # a restart keeps threads, and what was learned
        later, _ = ask(client, "#W9")
        assert "hit" in outcomes(tmp_path, later)
        asked, told = len(server.bodies), outcomes(tmp_path, first)
        history = client.threads.get_history(first)
        before = next(
            state for state in history if state["next"] == ["model"] and len(state["values"]["messages"]) == 1
        )
        again = client.runs.wait(first, "shop", input=None, checkpoint=before["checkpoint"])
        assert [message["content"] for message in again["messages"]] == shown
        assert len(server.bodies) == asked + 2 and outcomes(tmp_path, first) == told
