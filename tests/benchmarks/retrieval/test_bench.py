"""The retrieval benchmark: its bounds, its tables, and a small run against fakes and a real service."""

from __future__ import annotations

import io
import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentspec.benchmarks.report import print_report, write_json
from agentspec.benchmarks.retrieval.bases import Bases, CorpusQuestion
from agentspec.benchmarks.retrieval.bench import (
    SEQUENTIAL,
    SPECULATIVE,
    RetrievalBench,
    run_retrieval,
    speedup_goal,
)
from agentspec.testing import Answer, FakeBackend
from tests.fakes import FakeEncoder

WORDS = [f"{first}{second}" for first in "bdfgkl" for second in ("an", "el", "ir", "os", "um")]


class Reader(FakeBackend):
    """What it says next depends on every word of its prompt, the document's too."""

    model_name = "reader"

    def __init__(self) -> None:
        super().__init__(self._next, latency=0.0005)

    def _next(self, request: Any) -> Answer:
        draw = random.Random(zlib.crc32(self.prompt_text(request).encode()))
        return Answer("".join(f" {draw.choice(WORDS)}" for _ in range(4)), finish_reason="length")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    draw, path = random.Random(1), tmp_path / "corpus.jsonl"
    lines = ({"id": f"{at:02}", "text": " ".join(draw.choices(WORDS, k=8))} for at in range(40))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    for place in ("benchmarks.retrieval.bases", "reasoning.retrieval.knowledge.folder"):
        monkeypatch.setattr(f"agentspec.{place}.load_encoder", lambda model: FakeEncoder())
    opened = RetrievalBench(Reader(), 12, lambda text: None)  # type: ignore[arg-type]
    yield opened
    opened.close()


QUESTIONS = [CorpusQuestion(str(n), f"Which {word}?") for n, word in enumerate(WORDS[:7])]


@pytest.mark.slow
@pytest.mark.counted
def test_every_case_is_measured_and_reported(bench: RetrievalBench, corpus: Path, tmp_path: Path) -> None:
    with Bases.built(corpus, "fake", bench.loop, bench.progress) as bases:
        report = run_retrieval(bench, bases, QUESTIONS, synthetic=90)
    assert len(report.cases) == 5 and 0 < report.saved < 1
    for case in report.cases:
        assert case.same(SPECULATIVE) == 7 and case.ratio(speedup_goal(1.0)).pairs == 7
    out = io.StringIO()
    print_report(report, Console(file=out, width=220))
    assert "batches saved at fixed stride 3" in out.getvalue() and "exact dense, 90 x 16" in out.getvalue()
    write_json(report, tmp_path / "r.json", {"cpus": 2})
    figures = json.loads((tmp_path / "r.json").read_text())["cases"][0]["figures"]
    assert figures["same"] == {SEQUENTIAL: 7, SPECULATIVE: 7}
