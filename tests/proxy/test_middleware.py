"""What wraps every route: ids, errors, log lines and their writer."""

from __future__ import annotations

import inspect
import io
import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from agentspec import errors
from agentspec.errors import EngineError
from agentspec.proxy import logs
from agentspec.settings.load import Settings
from agentspec.testing import Answer, FakeBackend

MODEL = "fake"
FORM = {"message", "type", "param", "code", "doc_url"}
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend("fine")


@pytest.fixture(scope="module")
def opened(shared_gateway: Any, backend: FakeBackend) -> Any:
    return shared_gateway({MODEL: backend})


def test_pages(opened: Any) -> None:
    with openai.OpenAI(base_url=f"{opened.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).object == "model"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/none")
    with anthropic.Anthropic(base_url=opened.url, api_key="none", max_retries=0) as other:
        listed = other.models.list()
        [found] = listed.data
        assert (found.id, found.type, found.display_name, listed.has_more) == (MODEL, "model", MODEL, False)
        assert listed.first_id == listed.last_id == MODEL and found.created_at.tzinfo
        assert other.models.retrieve(MODEL) == found
        with pytest.raises(anthropic.NotFoundError):
            other.models.retrieve("org/none")
    assert httpx.get(f"{opened.url}/ready").json() == {"status": "ready"}
    assert set(httpx.get(f"{opened.url}/version").json()) == {"version"}
    metrics = httpx.get(f"{opened.url}/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "agentspec_build_info{" in metrics.text


def test_anthropics_client_lists_models_page_by_page(gateway: Any) -> None:
    names = [f"m{number}" for number in range(7)]
    running = gateway({name: FakeBackend("fine") for name in names})
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list(limit=3)] == names
        assert [model.id for model in client.models.list(limit=2, before_id="m5")][:2] == ["m3", "m4"]
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            client.models.list(limit=0)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/assistants", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/health", 405),
        ("POST", "/chat/completions", 404),
        ("GET", "/models/m", 404),
        ("POST", "/v1/v1/messages", 404),
    ],
)
def test_other_paths_and_methods_answer_in_the_same_shape(opened: Any, method: str, path: str, status: int) -> None:
    response = httpx.request(method, opened.url + path)
    assert response.status_code == status and set(response.json()["error"]) == FORM
    assert response.headers["x-request-id"].startswith("req-")
    assert (status == 405) == ("allow" in response.headers)
    message = response.json()["error"]["message"]
    assert (status == 404) == (f"no such route {path!r}" in message and "there are /v1/chat/completions" in message)
    assert ("has to end in /v1" in message) == path.startswith(("/chat", "/models"))
    assert ("leave /v1 out" in message) == path.startswith("/v1/v1/")


def test_unknown_names_make_no_labels(opened: Any) -> None:
    for name in ("canary-a", "canary-b"):
        httpx.post(f"{opened.url}/v1/chat/completions", json={**BODY, "model": name})
        httpx.get(f"{opened.url}/v1/models/{name}")
        httpx.get(f"{opened.url}/{name}")
    assert "canary" not in httpx.get(f"{opened.url}/metrics").text


def test_a_name_that_a_client_has_built_in_is_served(gateway: Any) -> None:
    running = gateway(
        {MODEL: FakeBackend("ok")}, Settings(backends={}, model_aliases={"gpt-5": MODEL, "claude-*": MODEL})
    )
    for name, path in (("gpt-5", "chat/completions"), ("claude-haiku-4-5", "messages")):
        answer = httpx.post(f"{running.url}/v1/{path}", json={**BODY, "model": name, "max_tokens": 5}).json()
        assert answer["model"] == name
    assert running.metric("agentspec_requests_total", route="/v1/messages", model=MODEL, outcome="ok") == 1
    listed = httpx.get(f"{running.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [MODEL, "gpt-5"]
    assert httpx.get(f"{running.url}/v1/models/gpt-5").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_answer_leads_to_the_log(gateway: Any, log: io.StringIO, stream: bool) -> None:
    failed = EngineError("the engine failed on this request")
    failed.__cause__ = KeyError("canary")
    answer = Answer("said", error=failed, error_after=1) if stream else failed
    url = f"{gateway({MODEL: FakeBackend(answer)}).url}/v1/chat/completions"
    response = httpx.post(url, json={**BODY, "stream": stream}, headers={"x-request-id": "r-9"})
    assert "the server's log says more about request r-9" in response.text and "canary" not in response.text
    [line] = [json.loads(line) for line in log.getvalue().splitlines() if '"internal error"' in line]
    assert (line["request_id"], line["exception"]) == ("r-9", "KeyError") and "canary" not in log.getvalue()


def test_one_line_a_request(gateway: Any, log: io.StringIO) -> None:
    running = gateway({MODEL: FakeBackend("a b c")})
    httpx.post(f"{running.url}/v1/chat/completions", json=BODY, headers={"x-request-id": "r-1"})
    running.metric("agentspec_requests_in_flight")
    [line] = [json.loads(line) for line in log.getvalue().splitlines() if '"event": "request"' in line]
    assert line["seconds"] > 0 and line["first_token_seconds"] > 0 and line["timestamp"]
    left = {name: line[name] for name in line if not name.endswith("seconds") and name != "timestamp"}
    assert left == {
        "event": "request",
        "level": "info",
        "request_id": "r-1",
        "method": "POST",
        "route": "/v1/chat/completions",
        "model": MODEL,
        "tenant": "default",
        "status": 200,
        "outcome": "ok",
        "stream": False,
        "prompt_tokens": 1,
        "completion_tokens": 3,
    }


TREE = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.AgentSpecError) and kind is not errors.UpstreamStatusError
]


@pytest.fixture(scope="module")
def failing(shared_gateway: Any) -> Any:
    """A gateway, and the list that holds the error of its model."""
    raised: list[Any] = []
    return shared_gateway({MODEL: FakeBackend(lambda request: raised[0])}), raised


@pytest.mark.parametrize("kind", TREE)
def test_every_error_has_its_answer(failing: Any, kind: type[errors.AgentSpecError]) -> None:
    needed: dict[str, Any] = {"limit": "tokens_per_minute", "retry_after": 1} if kind is errors.RateLimitError else {}
    running, raised = failing
    raised[:] = [kind("what went wrong", **needed)]
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=BODY)
    assert answer.status_code == kind.status and 400 <= answer.status_code < 600
    assert set(answer.json()["error"]) == FORM
    assert answer.json()["error"]["message"].startswith("what went wrong")
    if kind in (errors.OverloadedError, errors.ShuttingDownError, errors.NotReadyError):
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_error_says_nothing(failing: Any, stream: bool) -> None:
    running, raised = failing
    raised[:] = [Answer("a b", error=ZeroDivisionError("a canary"), error_after=1)]
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "stream": stream})
    assert answer.status_code == (200 if stream else 500) and "canary" not in answer.text
    assert "internal_error" in answer.text


class Stuck(io.StringIO):
    """A log that no one reads, until `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.open = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.open.wait(60)
        return super().write(text)


@pytest.mark.usefixtures("log")
def test_a_log_that_no_one_reads_holds_nothing_up_and_says_what_it_lost() -> None:
    stream = Stuck()
    logs.configure("INFO", stream, background=True)
    logs.logger.info("first")
    assert stream.entered.wait(60)
    for number in range(66_000):
        logs.logger.error("later", n=number)
    stream.open.set()
    logging.getLogger().handlers[0].flush()
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    written = [line["n"] for line in found if line["event"] == "later"]
    [lost] = [line["count"] for line in found if line["event"] == "log lines dropped"]
    assert written == [*range(len(written))] and len(written) + int(str(lost)) == 66_000


def test_no_line_is_lost_at_the_end() -> None:
    """However a process ends: each of these is a fork of one that has loaded the gateway."""
    ends = ["", "import logging, os; logging.shutdown(); os._exit(0)", "raise SystemExit(0)"]
    program = f"""
import os
from agentspec.proxy import logs
for end in {ends}:
    if not os.fork():
        break
    assert os.wait()[1] == 0
else:
    os._exit(0)
logs.configure("INFO", background=True)
for number in range(1000):
    logs.logger.info("said", n=number)
exec(end)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert [json.loads(line)["n"] for line in result.stderr.splitlines()] == list(range(1000)) * len(ends)


def test_an_error_names_its_line_of_the_documentation(gateway: Any) -> None:
    running = gateway({"m": FakeBackend("ok")})
    lines = re.findall("(?m)^### (.+)$", (Path(__file__).parents[2] / "docs/errors.md").read_text())
    wrong = (("chat/completions", {"model": "x"}), ("messages", {"model": "m"}), ("responses", []), ("nowhere", {}))
    for path, body in wrong:
        error = httpx.post(f"{running.url}/v1/{path}", json=body).json()["error"]
        page, line = error["doc_url"].split("#")
        assert page == "docs/errors.md" and line in lines and line in (error.get("code"), error["type"])
