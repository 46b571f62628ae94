from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.backends.torch import exactness


def test_it_says_exact_and_how_it_looked(program: Any, tiny_model: Path) -> None:
    result = program("verify", "--model", tiny_model, "--limit", 2, "--max-tokens", 8)
    assert result.exit_code == 0, result.output
    assert f"{tiny_model}, float32 on cpu: 4 answers, half greedy, half sampled" in result.output
    for way in ("on, cold", "on, warm", "on, side by side"):
        assert f"  {way}: 4 of 4 equal those without speculation" in result.output
    assert result.output.rstrip().endswith("exact")


def test_recorded_calls_and_json(program: Any, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    delta = [{"role": "user", "content": "hello"}]
    file.write_text(json.dumps({"session": "a", "messages_delta": delta, "response": "hi"}) + "\n")
    result = program("verify", "--model", tiny_model, "--calls", file, "--max-tokens", 4, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["exact"] and record["divergences"] == []
    assert {way: len(answers) for way, answers in record["answers"].items()} == {
        "off": 2, "on, cold": 2, "on, warm": 2, "on, side by side": 2
    }  # fmt: skip


def test_a_difference_is_shown_and_fails(program: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def verify(*_: Any) -> exactness.ExactnessReport:
        parted = exactness.TokenDivergence("on, cold", 1, 2, 65, 66, 0.25, 0.26, 1e-3)
        return exactness.ExactnessReport({"off": [[1], [2]], "on, cold": [[1], [3]]}, [parted])

    monkeypatch.setattr(exactness, "check_exactness", verify)
    result = program("verify", "--model", tiny_model, "--limit", 1)
    assert result.exit_code == 1
    assert "on, cold: 1 of 2 equal those without speculation" in result.output
    assert "on, cold, answer 2, token 3: " in result.output
    assert "+0.25 token by token, +0.26 in one forward, no near-tie (limit 0.001)" in result.output
    assert "NOT exact" in result.output


def test_prompts_that_leave_no_room(program: Any, tiny_model: Path) -> None:
    result = program("verify", "--model", tiny_model, "--max-tokens", 2048)
    assert result.exit_code == 2
    assert "no prompt leaves room for 2048 of the model's 2048 tokens" in result.output
