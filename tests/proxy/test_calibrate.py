"""`agentspec reasoning calibrate` over endpoints, as its user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentspec.backends.base import Capabilities
from agentspec.cli import app
from agentspec.testing import ThinkingModel

CONFIG = """
[backends.large]
kind = "openai"
base_url = "{large}/v1"
model = "m"
[backends.tiny]
kind = "openai"
base_url = "{tiny}/v1"
model = "m"
[models.fast]
strategy = "specreason"
base = "large"
small = "tiny"
"""


@pytest.fixture
def calibrate(gateway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command over a small model that is wrong and a judge that knows, with two problems."""

    def model(number: int) -> ThinkingModel:
        abilities = Capabilities(continue_final=True, logprobs=True)
        said = f"Answer: {number} of several words\n\n"
        return ThinkingModel(lambda thinking: said, score=lambda step: "4", answer="So it is.", capabilities=abilities)

    urls = {name: gateway({"m": model(number)}).url for name, number in (("large", 4), ("tiny", 5))}
    monkeypatch.chdir(tmp_path)
    Path("agentspec.toml").write_text(CONFIG.format(**urls))
    Path("problems.jsonl").write_text("".join(json.dumps({"problem": p, "answer": "4"}) + "\n" for p in "ab"))
    command = ["reasoning", "calibrate", "fast", "problems.jsonl"]
    return lambda *options: CliRunner().invoke(app, [*command, *options])


def test_a_curve_is_measured_written_down_and_gone_on_with(calibrate: Callable[..., Result]) -> None:
    options = ["--thresholds", "0,7", "--step-tokens", "2", "--json", "curve.json"]
    assert calibrate(*options, "--limit", "1").exit_code == 0
    begun = json.loads(Path("curve.json").read_text())
    assert begun["plan"]["changes"] == {"step_tokens": 2}
    assert [[one["correct"] for one in point["solved"]] for point in begun["points"]] == [[True], [False], [True]]
    assert begun["points"][0]["solved"][0]["base_tokens"] == 2
    result = calibrate(*options, "--resume", "--plot", "curve.svg")
    assert result.exit_code == 0 and "2 problems" in result.output and "Of " in result.output
    resumed = json.loads(Path("curve.json").read_text())
    assert [point["solved"][0] for point in resumed["points"]] == [point["solved"][0] for point in begun["points"]]
    assert all(len(point["solved"]) == 2 for point in resumed["points"]) and Path("curve.svg").exists()


def test_what_cannot_be_gone_on_with_is_refused(calibrate: Callable[..., Result]) -> None:
    assert calibrate("--resume").exit_code == 2
    assert calibrate("--thresholds", "0", "--json", "curve.json").exit_code == 0
    other = calibrate("--thresholds", "1", "--json", "curve.json", "--resume")
    assert other.exit_code == 1 and "other options" in other.stderr
    assert calibrate("--thresholds", "0", "--no-reuse").exit_code == 0
    assert calibrate("--thresholds", "much").exit_code == 2
