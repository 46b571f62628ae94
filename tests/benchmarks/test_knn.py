from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentspec.benchmarks.knn import ASKED, FIXED, OFF, ON, KnnReport, KnnRun, read_prompts
from agentspec.benchmarks.report import print_report, write_json
from agentspec.errors import ConfigurationError
from agentspec.types import KnnSpeculation


def took(**values: Any) -> KnnSpeculation:
    return KnnSpeculation(queries=10, model_seconds=1.0, **values)


def table_of(on: float) -> KnnReport:
    table = KnnReport(1000)
    for index in range(7):
        tokens = (index,) * 10
        guessed = took(searches=4, strides=(1, 3, 3, 3), accepted=6, wrong=2, search_seconds=0.4)
        table.runs[OFF].append(KnnRun(tokens, 2.0, took(searches=10, strides=(1,) * 10, search_seconds=1.0)))
        table.runs[ON].append(KnnRun(tokens, on, took(searches=2, strides=(1, 9), decided=4, search_seconds=0.2)))
        table.runs[ASKED].append(KnnRun(tokens, 1.5, guessed))
        table.runs[FIXED].append(KnnRun((9,) if index == 0 else tokens, 1.6, guessed))
    return table


@pytest.mark.parametrize(("on", "verdict"), [(1.0, "required 1.2x: met; aim 1.6x: met"), (1.9, "1.2x: missed")])
def test_the_table_says_what_was_reached(tmp_path: Path, on: float, verdict: str) -> None:
    table, console = table_of(on), Console(record=True, width=150)
    print_report(table, console)
    text = console.export_text()
    assert verdict in text and "bound, if searches cost nothing: 2.00x" in text
    assert "6/7" in text and "7/7" in text and "0.75" in text and "60%" in text and "1 9" in text
    write_json(table, tmp_path / "out.json", {"model": "m"})
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ratios"][ON]["median"] == pytest.approx(2.0 / on)
    assert written["entries"] == 1000 and len(written["runs"][FIXED]) == 7


def test_prompts_are_read_by_their_names(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"question": "why?"}\n{"text": "once"}\n{"id": 3}\n')
    assert read_prompts(file, 2) == ["why?\n", "once\n"]
    with pytest.raises(ConfigurationError, match="each line"):
        read_prompts(file, 3)
    file.write_text("why?\n")
    with pytest.raises(ConfigurationError, match=r"p.jsonl:1: not valid JSON"):
        read_prompts(file, 3)
