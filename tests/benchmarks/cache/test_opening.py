from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from agentspec.benchmarks.cache.opening import run_opening
from agentspec.benchmarks.report import print_report, write_json


def test_nodes_with_segments_map_them_and_all_draft_the_same(postgres: str, tmp_path: Path) -> None:
    said: list[Any] = []
    report = run_opening(postgres, str(tmp_path / "remote"), 20_000, 1, said.append)
    warm, cold = report.nodes
    assert warm.mapped_bytes == 20_000 * 4 and cold.mapped_bytes == 0
    assert all(one.same_drafts > 380 and 0.95 < one.right < 1.05 for one in report.nodes) and said
    console = Console(record=True, width=150)
    print_report(report, console)
    assert "20,000 tokens" in console.export_text()
    write_json(report, tmp_path / "out.json", {})
    assert len(json.loads((tmp_path / "out.json").read_text())["nodes"]) == 2
