"""Releases of vLLM have what the plug-in needs. Their wheels are unpacked, not installed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from agentspec.backends.engine_plugin.source_contract import missing
from agentspec.backends.vllm.plugin import METRICS, REQUIREMENTS
from agentspec.backends.vllm.runner_v2 import plugin as runner_v2
from tests.backends.conftest import NEWEST, Unpack

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(params=["0.32.0", "0.33.0", *NEWEST])
def vllm(request: pytest.FixtureRequest, released: Unpack) -> Path:
    return released("vllm", request.param)


def test_the_release_has_what_the_plug_in_needs(vllm: Path) -> None:
    needed = [*REQUIREMENTS, METRICS, *runner_v2.REQUIREMENTS, *runner_v2.HYBRID_REQUIREMENTS]
    assert missing(vllm, needed) == []


def test_the_first_runner_calls_the_proposer_as_ours_can_be_called(vllm: Path) -> None:
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


def test_the_runner_makes_and_calls_the_speculator_as_ours_can_be(vllm: Path) -> None:
    """The class is imported when a speculator is made, so that replacing it in its module is enough."""
    made = ast.unparse(ast.parse((vllm / "v1/worker/gpu/spec_decode/__init__.py").read_bytes()))
    _, _, branch = made.partition("elif speculative_config.use_ngram():\n")
    assert branch.lstrip().startswith("from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator")
    assert "return NgramGPUSpeculator(vllm_config, device, req_states)" in branch
    calls = ast.walk(ast.parse((vllm / "v1/worker/gpu/model_runner.py").read_bytes()))
    proposed = [
        call for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.speculator.propose"
    ]
    step, dummy = sorted(proposed, key=lambda call: len(call.args), reverse=True)
    given = [ast.unparse(argument) for argument in step.args]
    assert (given[0], *given[5:7]) == ("input_batch", "num_sampled", "num_rejected") and len(proposed) == 2
    assert not dummy.args and {"input_batch", "num_sampled", "dummy_run"} <= {word.arg for word in dummy.keywords}


def test_the_runner_makes_and_reads_speculators_as_ours_need(vllm: Path) -> None:
    runner = ast.unparse(ast.parse((vllm / "v1/worker/gpu/model_runner.py").read_bytes()))
    assert "self.speculator = init_speculator(self.vllm_config, self.device, self.req_states)" in runner
    assert "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens" in runner
    assert "self.speculator.draft_logits" in runner
    assert "getattr(self.speculator, 'enable_adaptive_verification', False)" in runner
    assert "record_confidences(self.speculator.draft_token_confidence_probs, input_batch)" in runner


def test_all_drafts_are_verified_by_the_function_that_ours_replaces(vllm: Path) -> None:
    """By its name in the module of the sampler, with twelve arguments by position."""
    tree = ast.parse((vllm / "v1/worker/gpu/spec_decode/rejection_sampler.py").read_bytes())
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
    (verified,) = [call for call in calls if ast.unparse(call.func) == "rejection_sample"]
    assert len(verified.args) == 12 and "use_fp64" in {word.arg for word in verified.keywords}
    sampler = ast.unparse(ast.parse((vllm / "v1/worker/gpu/sample/sampler.py").read_bytes()))
    assert (
        "apply_temperature=False, is_drafting=False, use_fp64=self.use_fp64_gumbel" in sampler
    )  # the draw without drafts


def test_the_runner_takes_no_tokens_back(vllm: Path) -> None:
    """Where a load of KV blocks has failed. Once it does (vLLM's issue 49250), our record has to do the same."""
    runner = ast.unparse(ast.parse((vllm / "v1/worker/gpu/model_runner.py").read_bytes()))
    _, _, update = runner.partition("def update_requests(")
    update, _, _ = update.partition("\n    def ")
    assert "num_computed_tokens_np[req_index] = num_computed_tokens" in update
    assert "total_len" not in update and "all_token_ids" not in update
