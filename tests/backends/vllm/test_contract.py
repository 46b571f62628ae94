"""Releases of vLLM have what the plug-in needs. Their wheels are unpacked, not installed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from agentspec.backends.engine_plugin.source_contract import missing
from agentspec.backends.vllm.plugin import METRICS, REQUIREMENTS
from tests.backends.conftest import NEWEST, Unpack

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(params=["0.32.0", "0.33.0", *NEWEST])
def vllm(request: pytest.FixtureRequest, released: Unpack) -> Path:
    return released("vllm", request.param)


def test_the_release_has_what_the_plug_in_needs(vllm: Path) -> None:
    assert missing(vllm, [*REQUIREMENTS, METRICS]) == []


def test_the_runner_calls_the_proposer_as_ours_can_be_called(vllm: Path) -> None:
    """Three arguments by position, all others by keyword; made from the configuration alone."""
    tree = ast.parse((vllm / "v1/worker/gpu_model_runner.py").read_bytes())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (made,) = [call for call in calls if ast.unparse(call.func) == "SuffixDecodingProposer"]
    assert [ast.unparse(argument) for argument in made.args] == ["self.vllm_config"] and not made.keywords
    suffix = [call for call in calls if _of_suffix(call)]
    assert [ast.unparse(argument) for argument in suffix[0].args][1:] == ["self.input_batch", "sampled_token_ids"]
    assert len(suffix) == 1 and all(keyword.arg for keyword in suffix[0].keywords)


def test_new_requests_take_an_attribute(vllm: Path) -> None:
    """Their salt: a class without room for it would fail in the scheduler."""
    tree = ast.parse((vllm / "v1/core/sched/output.py").read_bytes())
    (made,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "NewRequestData"]
    assert [ast.unparse(decorator) for decorator in made.decorator_list] == ["dataclass"] and not made.bases


def _of_suffix(call: ast.Call) -> bool:
    given = {keyword.arg for keyword in call.keywords}
    return ast.unparse(call.func) == "self.drafter.propose" and len(call.args) == 3 and given == {"slot_mappings"}
