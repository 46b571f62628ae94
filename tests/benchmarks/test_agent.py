from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentspec.benchmarks.agent import KEPT, AgentBench, AgentReport
from agentspec.benchmarks.agent_workflows import Workflow, WorkflowTurn
from agentspec.benchmarks.report import print_report, write_json
from agentspec.benchmarks.runs import COLD, OFF, TRANSFORMERS, Run, RunTable, warm_name
from agentspec.types import Delta, GenerateRequest, Message, Speculation

WARM = warm_name(20)


def flow_of(name: str, *asked: str) -> Workflow:
    return Workflow(name, tuple(WorkflowTurn(text, text.upper()) for text in asked))


FLOWS = [flow_of("stack", "ab", "cd", "ef"), flow_of("queue", "gh", "ij", "kl")]


class Characters:
    """A backend whose tokens are characters and whose answers count its requests, and the peer beside it."""

    model_name = "characters"

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.asked: list[str] = []

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return [ord(character) for message in messages[1:] for character in message["content"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        yield Delta(token_ids=(*self.answer(request.token_ids or ()),))
        yield Delta(finish_reason="stop", speculation=Speculation(steps=1))

    def generate_alone(self, prompt: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], float]:
        return (*self.answer(prompt),), 1.0

    def answer(self, prompt: Sequence[int]) -> list[int]:
        self.asked.append(self.decode(prompt))
        return [ord(character) for character in str(len(self.asked))]


class Peer:
    def __init__(self, backend: Characters) -> None:
        self.generate = self.continue_from = backend.generate_alone


@pytest.fixture
def backend() -> Characters:
    return Characters()


@pytest.fixture
def bench(backend: Characters) -> Any:
    bench: Any = AgentBench(backend, Peer(backend), asyncio.new_event_loop(), lambda message: None)  # type: ignore[arg-type]
    yield bench
    bench.loop.close()


def test_all_variants_are_asked_the_same_of_each_session_in_turn(bench: Any, backend: Characters) -> None:
    table, prompt_tokens = bench.measure(FLOWS, bench.variants(20))
    assert backend.asked[1:10] == ["ab", "abABcd", "abABcdCDef"] * 3  # the first call is the peer's trial
    assert backend.asked[10:] == ["gh", "ghGHij", "ghGHijIJkl"] * 3
    assert [len(table.runs[name]) for name in (TRANSFORMERS, COLD, WARM)] == [6, 6, 6]
    assert prompt_tokens == ((2, 6, 10), (2, 6, 10))


def test_cold_sessions_have_tenants_of_their_own_and_warm_ones_share_theirs(bench: Any, backend: Characters) -> None:
    bench.warm([flow_of("other", "x", "y")])
    warmed = {request.tenant for request in backend.requests}
    bench.measure(FLOWS, bench.variants(20, off=True))
    tenants = [(request.tenant, request.labels.session) for request in backend.requests[2:] if request.speculation]
    assert {tenant for tenant, session in tenants} - warmed == {f"{COLD}: stack", f"{COLD}: queue"}
    assert {session for tenant, session in tenants if tenant in warmed} == {"stack", "queue"}
    assert sum(not request.speculation for request in backend.requests) == 6


def test_extras_are_measured_on_request(bench: Any) -> None:
    assert list(bench.variants(20)) == [TRANSFORMERS, COLD, WARM]
    assert list(bench.variants(20, off=True, kept=True)) == [TRANSFORMERS, OFF, KEPT, COLD, WARM]


def report_of(seconds: dict[str, float]) -> AgentReport:
    table = RunTable("agent sessions", turns=2)
    for _ in range(14):
        for name, value in seconds.items():
            stats = None if name == TRANSFORMERS else Speculation(drafted=90, accepted=75, steps=25)
            table.add(name, Run((1,) * 100, value, stats))
    return AgentReport(table, WARM, ((500, 4000),) * 7)


def test_the_report_compares_whole_sessions_with_transformers(tmp_path: Path) -> None:
    report = report_of({TRANSFORMERS: 40.0, COLD: 10.0, WARM: 16.0})
    console = Console(record=True, width=140)
    print_report(report, console)
    text = console.export_text()
    assert "7 sessions: prompts of 500 to 4000 tokens, answers of 100" in text
    assert f"{COLD} / {TRANSFORMERS}: 4.00x [4.00, 4.00], goal 3.0x: met" in text
    assert f"{WARM} / {TRANSFORMERS}: 2.50x [2.50, 2.50], goal 4.0x: missed" in text
    assert "80.0" in text and "14/14" in text
    write_json(report, tmp_path / "out.json", {"model": "m"})
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["ratios"][COLD]["pairs"] == 7 and len(data["runs"][COLD]) == 14
    assert [goal["verdict"] for goal in data["goals"]] == ["met", "missed"]


def test_all_variants_answer_alike(model: str) -> None:
    """Two short turns: the same tokens from all, transformers with its rows kept included."""
    flow = flow_of("short", "Say: one two three.", "Say it again.")
    bench = AgentBench.load(model, lambda message: None)
    try:
        table, _ = bench.measure([flow], bench.variants(1, off=True, kept=True))
    finally:
        bench.close()
    assert len(table.runs) == 5
    assert len({tuple(run.tokens for run in runs) for runs in table.runs.values()}) == 1
