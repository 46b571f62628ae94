"""OpenTelemetry: one trace through steps, calls, gateways, tools and searches, in the names of the conventions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from opentelemetry import trace

from agentspec import chat, step
from agentspec.langchain import AgentSpecMiddleware, KnowledgeRetriever
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.reasoning.retrieval.knowledge.folder import in_memory
from agentspec.step import headers, workflow
from agentspec.testing import FakeBackend
from tests.langchain.test_early_tools import ScriptedModel, asks, session, trained
from tests.proxy.conftest import gateway, upstream
from tests.proxy.upstreams import settings

__all__ = ["gateway", "upstream"]

sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

PUBLISHED = frozenset((Path(__file__).parent / "gen_ai_attributes.txt").read_text().split())
"""From the registry of attributes of github.com/open-telemetry/semantic-conventions-genai in November 2026."""
SWITCH = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "canary"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The spans that have ended; at the end, that their attributes have published names alone."""
    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.delenv(SWITCH, raising=False)
    yield exporter.get_finished_spans
    ended = exporter.get_finished_spans()
    used = {name for span in ended for name in span.attributes or {}}
    assert ended and {name for name in used if name.startswith("gen_ai.")} <= PUBLISHED
    known = ("gen_ai.", "agentspec.", "error.type", "http.response.status_code")
    assert all(name.startswith(known) for name in used)


def parent(span: Any) -> str:
    return f"00-{span.context.trace_id:032x}-{span.parent.span_id:016x}-01"


def said_of(spans: Any, name: str) -> dict[str, Any]:
    """The attributes of the last span of this name."""
    return dict([one for one in spans() if one.name == name][-1].attributes)


def asked(url: str, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 9, "temperature": 0.5, "messages": [{"role": "user", "content": SECRET}]}
    sent = {"traceparent": CALLER, **fields.pop("headers", {})}
    return httpx.post(f"{url}/v1/{path}", json={**body, **fields}, headers=sent, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_joins_the_callers_trace_and_hands_it_on(spans: Any, gateway: Any, stream: bool) -> None:
    inner = gateway({"m": FakeBackend("four words of canary")})
    outer = gateway({}, settings(f"{inner.url}/v1"))
    labels, options = {"x-agentspec-session": "s1", "x-agentspec-step": "plan"}, {"include_usage": True}
    answer = asked(outer.url, headers=labels, **({"stream": True, "stream_options": options} if stream else {}))
    assert answer.status_code == 200 and outer.metric("agentspec_requests_in_flight") == 0
    inner.metric("agentspec_requests_in_flight")
    first, last = sorted((one for one in spans() if one.name == "chat m"), key=lambda one: one.start_time)
    assert parent(first) == CALLER and last.parent.span_id == first.context.span_id
    said = dict(first.attributes)
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.request.model"] == "m"
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.temperature"]) == (9, 0.5)
    assert (said["gen_ai.conversation.id"], said["gen_ai.agent.name"]) == ("s1", "plan")
    assert said["gen_ai.usage.output_tokens"] == 4 and said["agentspec.backend"] == "up"
    assert ("gen_ai.response.time_to_first_chunk" in said) == stream
    assert SECRET not in str([one.attributes for one in (first, last)])
    assert asked(inner.url, model="other").status_code == 404 and not inner.metric("agentspec_requests_in_flight")
    refused = said_of(spans, "chat")
    assert refused["error.type"] == "model_not_found" and spans()[-1].status.status_code is trace.StatusCode.ERROR


def test_a_provider_may_be_set_after_the_gateway_was_made(gateway: Any, request: pytest.FixtureRequest) -> None:
    running = gateway({"m": FakeBackend("an answer")})
    assert asked(running.url).status_code == 200
    spans = request.getfixturevalue("spans")
    assert asked(running.url).status_code == 200 and not running.metric("agentspec_requests_in_flight")
    assert [parent(one) for one in spans()] == [CALLER]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_in_spans_only_by_the_switch_and_where_the_client_stores(
    spans: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    running = gateway({"m": FakeBackend("an answer")})
    monkeypatch.setenv(SWITCH, "span_only")
    said: Any = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 9}
    body = {"model": "m", "stream": stream, **({"input": SECRET} if path == "responses" else said)}
    for store in ("off", "on"):
        done = httpx.post(f"{running.url}/v1/{path}", json=body, headers={"x-agentspec-store": store}, timeout=60)
        assert done.status_code == 200, done.text
        running.metric("agentspec_requests_in_flight")
    kept, shown = (dict(one.attributes) for one in spans())
    assert not {name for name in kept if name.endswith(".messages")}
    parts = [{"type": "text", "content": SECRET}]
    assert json.loads(shown["gen_ai.input.messages"]) == [{"role": "user", "parts": parts}]
    (output,) = json.loads(shown["gen_ai.output.messages"])
    assert output["parts"] == [{"type": "text", "content": "an answer"}] and output["finish_reason"] != "unknown"


def test_a_workflow_a_step_and_its_call_are_one_trace(spans: Any, gateway: Any) -> None:
    running = gateway({"m": FakeBackend("an answer")})

    @step("plan")
    def plan() -> str:
        assert headers()["traceparent"]
        return str(chat(SECRET, model="m", base_url=f"{running.url}/v1", max_tokens=9))

    with workflow("trip", session="s1"):
        assert plan() == "an answer"
    running.metric("agentspec_requests_in_flight")
    by_id = {one.context.span_id: one for one in spans()}
    served = next(one for one in by_id.values() if one.kind is trace.SpanKind.SERVER)
    line = [served]
    while line[-1].parent is not None:
        line.append(by_id[line[-1].parent.span_id])
    assert [one.name for one in line] == ["chat m", "chat m", "invoke_agent plan", "invoke_workflow trip"]
    assert line[1].attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_generators_of_a_step_leave_no_span_behind(spans: Any) -> None:
    @step("pieces")
    def pieces() -> Iterator[bool]:
        for _ in range(2):
            yield trace.get_current_span().is_recording()

    assert [(inside, trace.get_current_span().is_recording()) for inside in pieces()] == [(True, False)] * 2
    assert [one.name for one in spans()] == ["invoke_agent pieces"]

    @step("fails")
    def fails() -> None:
        raise KeyError(SECRET)

    with pytest.raises(KeyError):
        fails()
    assert said_of(spans, "invoke_agent fails")["error.type"] == "KeyError" and SECRET not in str(spans())


@tool
def look(order: str) -> str:
    """Read an order."""
    return f"{order} is there"


def test_tools_of_an_agent_and_searches(spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = [asks("look", order=SECRET), AIMessage("done"), asks("look", order="1"), AIMessage("")]
    model = ScriptedModel(messages=iter(script))
    agent: Any = create_agent(model, [look], middleware=[AgentSpecMiddleware()], name="shop")
    agent.invoke({"messages": "hi"})
    said = said_of(spans, "execute_tool look")
    assert said["gen_ai.tool.call.id"] == "call look" and SECRET not in str(said)
    base = in_memory([Document("d1", "about cats"), Document("d2", "about dogs")], "bm25")
    KnowledgeRetriever(base=base, k=1).invoke("cats")
    found = said_of(spans, "retrieval")
    assert json.loads(found["gen_ai.retrieval.documents"])[0]["id"] == "d1"
    assert "gen_ai.retrieval.query.text" not in found
    monkeypatch.setenv(SWITCH, "true")
    agent.invoke({"messages": "hi"})
    assert json.loads(said_of(spans, "execute_tool look")["gen_ai.tool.call.arguments"]) == {"order": "1"}


@pytest.mark.usefixtures("likely_starts_pay")
def test_a_tool_that_started_early_says_what_became_of_it(spans: Any) -> None:
    session(trained()[0], 9)
    tools = [dict(one.attributes) for one in spans() if one.name == "execute_tool look"]
    hits = [one for one in tools if one.get("agentspec.tool.outcome") == "hit"]
    assert hits and len(hits) == len([one for one in tools if one.get("agentspec.tool.early")])


def test_serve_sends_its_spans_to_the_collector_of_the_environment(upstream: Any, tmp_path: Path) -> None:
    answer = b'{"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}'
    server = upstream(lambda request: request.answer(answer))  # and a collector
    own = {"OTEL_EXPORTER_OTLP_ENDPOINT": server.url, "OTEL_EXPORTER_OTLP_HEADERS": "x-key=k"}
    command = [Path(sys.executable).with_name("agentspec"), "serve", "--upstream", server.url, "--port", "0"]
    starting: dict[str, Any] = {"env": {**os.environ, **own}, "cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **starting) as serving:
        ready = next(line for line in serving.stderr or () if '"ready"' in line)
        assert asked(json.loads(ready)["url"].removesuffix("/v1")).status_code == 200
        serving.terminate()
        assert serving.wait(60) == 0
    starting["env"]["OTEL_EXPORTER_OTLP_PROTOCOL"] = "grpc"
    refused = subprocess.run(command, **starting)
    assert refused.returncode == 2 and "OTEL_EXPORTER_OTLP_PROTOCOL" in refused.stderr
    sent = {one.target: (one.headers, one.body) for one in server.requests if one.method == "POST"}
    (headers, spans), (asking, _) = sent["/v1/v1/traces"], sent["/v1/chat/completions"]
    trace_id = CALLER.split("-")[1]
    assert headers["x-key"] == "k" and b"service.name" in spans and bytes.fromhex(trace_id) in spans
    assert trace_id in asking["traceparent"] and asking["traceparent"] != CALLER and SECRET.encode() not in spans
