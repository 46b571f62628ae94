"""Releases of vLLM have what our speculator and our drafts beside a model need, and their own classes take ours.

Wheels are unpacked, not installed.
"""

from __future__ import annotations

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from agentspec.backends.engine_plugin.source_contract import missing
from agentspec.backends.vllm.runner_v2 import plugin
from agentspec.backends.vllm.runner_v2.passages import PassageShape
from agentspec.backends.vllm.runner_v2.retrieval import PassageRetriever
from agentspec.cache import SuffixCache
from tests.backends.conftest import NEWEST, Unpack
from tests.backends.vllm.runner_v2.conftest import DRAFTED, LONGEST, REQUESTS, VOCABULARY, Late, Runner, text

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
FOLDER = Path("v1/worker/gpu/spec_decode")


@pytest.fixture(params=["0.32.0", "0.33.0", *NEWEST])
def vllm(request: pytest.FixtureRequest, released: Unpack) -> Path:
    return released("vllm", request.param)


def test_the_release_has_what_the_speculator_needs(vllm: Path) -> None:
    assert missing(vllm, plugin.REQUIREMENTS) == []


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


def test_the_release_own_classes_run_ours(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, ranks: SimpleNamespace, cache: SuffixCache, late: Late
) -> None:
    """vLLM's `NgramGPUSpeculator` and `RequestState`, on a CPU, with stand-ins for what needs a GPU to be imported."""
    speculators, states = _load(vllm, monkeypatch)
    monkeypatch.setattr(plugin, "open_retriever", lambda config, shape: _retriever(cache, shape))
    spec = SimpleNamespace(num_speculative_tokens=DRAFTED, prompt_lookup_min=5, prompt_lookup_max=5)
    config = SimpleNamespace(
        speculative_config=spec,
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        model_config=SimpleNamespace(max_model_len=LONGEST),
    )
    held = states.RequestState(REQUESTS, LONGEST, 64, DRAFTED, VOCABULARY, torch.device("cpu"), 1, True)
    ours = plugin.speculator_class(speculators.NgramGPUSpeculator)(config, torch.device("cpu"), held)
    assert isinstance(ours, speculators.NgramGPUSpeculator)
    assert ours.capture() is None and ours.draft_logits is None
    prompt, answer, took = text(1, 20), text(2, 40), []
    for call in ("first", "second"):
        runner = Runner(ours, late)
        runner.begin(call, prompt, answer)
        assert runner.run() == {call: answer}
        took.append(runner.steps)
    ours.close()
    assert took[0] == len(answer) and took[1] <= len(answer) // (DRAFTED + 1) + 2


def _retriever(cache: SuffixCache, shape: PassageShape) -> PassageRetriever:
    return PassageRetriever(lambda state, prompt: cache.request(prompt), VOCABULARY, shape)


class _Tensor:
    """vLLM's `StagedWriteTensor` and `UvaBackedTensor`, which need pinned memory: only what is read of them."""

    def __init__(self, size: Any, dtype: torch.dtype, **_: Any) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)


def _load(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The modules of the n-gram speculator and of the requests' states."""

    class BaseSpeculator:
        """Abstract in vLLM; its module needs compiled code."""

    triton = SimpleNamespace(jit=lambda kernel: kernel, cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << n)
    stubs: dict[str, dict[str, Any]] = {
        "vllm.config": {"VllmConfig": object},
        "vllm.triton_utils": {"HAS_TRITON": True, "tl": SimpleNamespace(constexpr=int), "triton": triton},
        "vllm.v1.worker.gpu.input_batch": {"InputBatch": object},
        "vllm.v1.worker.gpu.spec_decode.speculator": {"BaseSpeculator": BaseSpeculator},
        "vllm.v1.worker.gpu.buffer_utils": {"StagedWriteTensor": _Tensor, "UvaBackedTensor": _Tensor},
    }
    for name, members in stubs.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if (package := ".".join(parts[:end])) not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(members)
    return _execute(vllm / "v1/worker/gpu/spec_decode/ngram/speculator.py"), _execute(vllm / "v1/worker/gpu/states.py")


def _execute(file: Path) -> ModuleType:
    spec = spec_from_file_location(f"released_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_release_has_what_drafts_beside_a_model_need(vllm: Path) -> None:
    assert missing(vllm, plugin.HYBRID_REQUIREMENTS) == []


def test_the_runner_makes_and_reads_speculators_as_ours_need(vllm: Path) -> None:
    runner = ast.unparse(ast.parse((vllm / "v1/worker/gpu/model_runner.py").read_bytes()))
    assert "self.speculator = init_speculator(self.vllm_config, self.device, self.req_states)" in runner
    assert "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens" in runner
    assert "self.speculator.draft_logits" in runner
    assert "getattr(self.speculator, 'enable_adaptive_verification', False)" in runner
    assert "record_confidences(self.speculator.draft_token_confidence_probs, input_batch)" in runner


def test_all_drafts_are_verified_by_the_function_that_ours_replaces(vllm: Path) -> None:
    """By its name in the module of the sampler, with twelve arguments by position."""
    tree = ast.parse((vllm / FOLDER / "rejection_sampler.py").read_bytes())
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
