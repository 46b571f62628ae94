from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from agentspec.benchmarks.cache.replay import installed_version, run_cache
from agentspec.benchmarks.traces import END, START

IDS = {START: 1, END: 2}


def encode(text: str) -> list[int]:
    for mark, number in IDS.items():
        text = text.replace(mark, chr(number))
    return [ord(character) for character in text]


def quiet(message: str) -> None:
    pass


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight sessions in which an agent calls the same tool."""
    path = tmp_path / "agent_tau2.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        for number in range(8):
            delta = [{"role": "user", "content": f"task {number}"}]
            answer = f'{{"name": "look_up_order", "arguments": {{"id": {number}}}}}'
            lines.write(json.dumps({"session": f"s{number}", "messages_delta": delta, "response": answer}) + "\n")
    return path


def test_the_second_call_is_drafted_from_the_first(trace: Path) -> None:
    report = run_cache([trace], encode, calls=600, budgets=(32, 8), progress=quiet)
    (file,) = report.files
    assert file.name == "agent_tau2" and report.budgets == [8, 32] and report.costs is None
    for replay in file.replays.values():
        assert replay.tokens == [len('{"name": "look_up_order", "arguments": {"id": 0}}') + 1] * 8
        assert replay.steps[0] > 2 * replay.steps[-1]
    assert file.replays[32].tokens_per_step > file.replays[8].tokens_per_step > 1.5


@pytest.mark.skipif(installed_version() is not None, reason="the peer is run instead")
def test_without_the_peer_nothing_is_compared(trace: Path) -> None:
    report = run_cache([trace], encode, calls=5, budgets=(4, 8), progress=quiet)
    (file,) = report.files
    assert len(file.replays[8].tokens) == 5 and "pip install" in report.peer_source
    assert file.peer == {} and file.ratio(8) is None and report.mean_ratio(8) is None
