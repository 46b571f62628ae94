"""Published logs become the calls that their agents made, and each cost of the cache is measured."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.benchmarks.cache.costs import TREE, measure_costs
from agentspec.benchmarks.cache.public_logs import LogSource, convert
from agentspec.errors import ConfigurationError

CALL = {"function": {"name": "find", "arguments": '{"id":"é"}'}, "id": "c1", "type": "function"}
AGENT = [
    {"role": "system", "content": "policy"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "who?"},
    {"role": "user", "content": "me"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
    {"role": "assistant", "content": [{"type": "text", "text": "done"}], "tool_calls": [CALL, CALL]},
    {"role": "exit", "content": "over"},
]
FIND = '{"name": "find", "arguments": {"id": "é"}}'
ANSWERS = ["who?", FIND, f"done\n{FIND}\n{FIND}"]


def converted(source: LogSource, tmp_path: Path, log: Any) -> list[dict[str, Any]]:
    file, out = tmp_path / "runs.json", tmp_path / "out.jsonl.gz"
    file.write_text(log if isinstance(log, str) else json.dumps(log), "utf-8")
    count = convert(source, [file], out)
    records = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert len(records) == count
    return records


@pytest.mark.parametrize(
    ("source", "log"),
    [
        (LogSource.tau_bench, [{"task_id": 3, "trial": 1, "traj": AGENT}]),
        (LogSource.mini_swe_agent, {"info": {}, "messages": AGENT}),
    ],
)
def test_calls_hold_what_was_added_since_the_last(source: LogSource, log: Any, tmp_path: Path) -> None:
    records = converted(source, tmp_path, log)
    assert [record["response"] for record in records] == ANSWERS
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [[m["content"] for m in record["messages_delta"]] for record in records] == [
        ["policy", "hello"],
        ["me"],
        ["found"],
    ]
    assert records[2]["messages_delta"][0]["role"] == "tool"
    assert len({record["session"] for record in records}) == 1


@pytest.mark.parametrize("source", list(LogSource))
@pytest.mark.parametrize("log", ["{}", "[1]", "not a log"])
def test_what_is_no_log_is_refused_and_nothing_is_written(source: LogSource, log: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        converted(source, tmp_path, log)
    assert [file.name for file in tmp_path.iterdir()] == ["runs.json"]


@pytest.mark.slow
@pytest.mark.counted
def test_every_cost_is_measured() -> None:
    costs = measure_costs(1500, lambda message: None, cached=3000)
    assert costs.draft.cached_tokens == 3000 and costs.opened_tokens == 1500
    assert 0 < costs.draft.median <= costs.draft.p99 <= costs.draft.longest < 10
    assert 1 < costs.draft.tree <= TREE
    for value in (costs.insert, costs.record, costs.request_start, costs.open_seconds):
        assert 0 < value < 10
    assert costs.insert < costs.record  # recording includes it
    assert 8 <= costs.memory_bytes < 40 and costs.disk_bytes > 1
    assert costs.segment_bytes is not None and 8 < costs.segment_bytes < 12
