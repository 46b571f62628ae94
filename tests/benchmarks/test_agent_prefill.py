"""The benchmark of reading ahead: both variants see the same prompts, and only one of them is read ahead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from agentspec.benchmarks.agent_prefill import CASES, EVICTED, NODE, AgentPrefillBench, AgentPrefillReport
from agentspec.benchmarks.report import MIN_PAIRS, print_report, write_json
from agentspec.types import Delta, GenerateRequest, Usage


class Reading:
    """A backend that answers with the length of the prompt, and keeps what it read for each tenant."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.ahead: list[GenerateRequest] = []
        self.kept: dict[str, str] = {}
        self.closed = False

    def stats(self) -> Any:
        return SimpleNamespace(kv_rows_limit=1000)

    def decode(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids))

    def text(self, request: GenerateRequest) -> str:
        return "".join(f"{message['role']}{message['content']}" for message in request.messages or ())

    async def prefill(self, request: GenerateRequest, *, unfinished: bool = False) -> bool:
        self.ahead.append(request)
        self.kept[request.tenant] = self.text(request)
        return True

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        text, kept = self.text(request), self.kept.get(request.tenant, "")
        shared = next((at for at, (one, two) in enumerate(zip(text, kept, strict=False)) if one != two), len(kept))
        self.kept[request.tenant] = text
        yield Delta("x", (len(text) % 50 + 65,))
        yield Delta(finish_reason="stop", usage=Usage(len(text), 1, min(shared, len(text) - 1)))

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def measured() -> tuple[AgentPrefillReport, Reading]:
    backend = Reading()
    bench = AgentPrefillBench(cast(Any, backend), lambda text: None)
    return asyncio.run(bench.measure((0.0,), tuple(CASES))), backend


def test_both_variants_see_the_same_prompts(measured: tuple[AgentPrefillReport, Reading]) -> None:
    found, backend = measured
    asked = {request.tenant: backend.text(request) for request in backend.requests}
    for one in found.pairs:
        assert one.identical == len(one.off) == len(one.on) == MIN_PAIRS
        for number in range(MIN_PAIRS):
            assert asked[f"{one.case}/0.0/{number}/off"] == asked[f"{one.case}/0.0/{number}/on"]
    assert backend.closed and len(backend.requests) > 4 * 2 * 2 * MIN_PAIRS


def test_both_clocks_are_told(measured: tuple[AgentPrefillReport, Reading]) -> None:
    found, _ = measured
    with Console(width=200, record=True) as console:
        print_report(found, console)
    assert all(turn.seconds >= 0.0 <= turn.processor for one in found.pairs for turn in (*one.on, *one.off))
    assert {side: len(rounds) for side, rounds in found.busy_processor.items()} == {"off": 7, "on": 7}
    shown = console.export_text()
    assert "next turn, by the clock" in shown and "next turn, on the processor" in shown


def test_one_of_them_is_read_ahead(measured: tuple[AgentPrefillReport, Reading]) -> None:
    found, backend = measured
    assert {request.tenant.rpartition("/")[2] for request in backend.ahead} == {"on"}
    for one in found.pairs:
        assert all(on.computed < off.computed for on, off in zip(one.on, one.off, strict=True))
    others = [request for request in backend.requests if request.tenant.startswith("other")]
    assert len(others) == 2 * 2 * MIN_PAIRS  # whenever slots are to be dropped, 1000 of them
    assert {one.case for one in found.pairs} == set(CASES) and NODE in CASES and EVICTED in CASES


def test_the_report(measured: tuple[AgentPrefillReport, Reading], tmp_path: Path) -> None:
    found, _ = measured
    with Console(width=200, record=True) as console:
        print_report(found, console)
    shown = console.export_text()
    assert "rewritten" in shown and "1.5x" in shown and "throughput" in shown
    write_json(found, tmp_path / "out.json", {})
    data = json.loads((tmp_path / "out.json").read_text())
    assert len(data["pairs"]) == len(CASES) and len(data["busy"]["on"]) == MIN_PAIRS


def test_more_rounds_than_there_are_workflows() -> None:
    bench = AgentPrefillBench(cast(Any, Reading()), lambda text: None, rounds=MIN_PAIRS + 1)
    found = asyncio.run(bench.measure((0.0,), (NODE,)))
    assert [len(one.on) for one in found.pairs] == [MIN_PAIRS + 1] == [len(found.busy["on"])]
