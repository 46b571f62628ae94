"""Releases of vLLM have what our drafts beside a model need, and their own classes take ours."""

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
from tests.backends.conftest import Unpack
from tests.backends.vllm.runner_v2.conftest import DRAFTED, LONGEST, REQUESTS, VOCABULARY, RequestStates, Runner, text

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
FOLDER = Path("v1/worker/gpu/spec_decode")


@pytest.fixture(params=["0.32.0", "0.33.0"])
def vllm(request: pytest.FixtureRequest, released: Unpack) -> Path:
    return released("vllm", request.param)


def test_the_release_has_what_drafts_beside_a_model_need(vllm: Path) -> None:
    assert missing(vllm, plugin.HYBRID_REQUIREMENTS) == []


def test_the_runner_makes_and_reads_speculators_as_ours_need(vllm: Path) -> None:
    runner = ast.unparse(ast.parse((vllm / "v1/worker/gpu/model_runner.py").read_bytes()))
    assert "self.speculator = init_speculator(self.vllm_config, self.device, self.req_states)" in runner
    assert "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens" in runner
    assert "self.speculator.draft_logits" in runner
    kernels = (vllm / FOLDER / "rejection_sampler_utils.py").read_text()
    assert 'max > float("-inf")' in kernels  # a block of the vocabulary without any probability is allowed for


def test_the_release_own_class_drafts_beside_ours(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, ranks: SimpleNamespace, cache: SuffixCache
) -> None:
    """vLLM's `DraftModelSpeculator` on a CPU, with stand-ins for what it imports, and a model that is always wrong."""
    theirs = _load(vllm, monkeypatch).DraftModelSpeculator

    def propose(self: Any, input_batch: Any, *_: Any, **__: Any) -> torch.Tensor:
        drafts: torch.Tensor = self.draft_tokens[: input_batch.num_reqs]
        return drafts.fill_(VOCABULARY - 1)

    abstract = dict.fromkeys(theirs.__abstractmethods__, lambda self, *_: None)
    config = _config()
    made = type("Model", (theirs,), {**abstract, "propose": propose})(config, torch.device("cpu"))
    monkeypatch.setattr(plugin, "listen_to_scheduler", lambda: None)
    monkeypatch.setattr(plugin, "close_at_exit", lambda close: None)
    monkeypatch.setattr(plugin, "open_retriever", lambda config, shape: _retriever(cache, shape))
    assert plugin.join_model(made, config, RequestStates()) is made
    beside = getattr(made, plugin.BESIDE)
    assert made.propose == beside.propose
    prompt, answer, took = text(1, 20), text(2, 40), []
    for call in ("first", "second"):
        runner = Runner(beside)
        runner.begin(call, prompt, answer)
        assert runner.run() == {call: answer}
        took.append(runner.steps)
        beside.begin([])
    beside.close()
    assert took[0] == len(answer) and took[1] <= len(answer) // (DRAFTED + 1) + 3
    assert torch.isinf(made.draft_logits[0, 0]).sum() == VOCABULARY - 1


def _retriever(cache: SuffixCache, shape: PassageShape) -> PassageRetriever:
    return PassageRetriever(lambda state, prompt: cache.request(prompt), VOCABULARY, shape)


def _config() -> Any:
    model = SimpleNamespace(get_hidden_size=lambda: 8, get_vocab_size=lambda: VOCABULARY, hf_config=None)
    speculative = SimpleNamespace(
        method="eagle3",
        num_speculative_tokens=DRAFTED,
        draft_model_config=model,
        use_local_argmax_reduction=False,
        enable_adaptive_verification=False,
        draft_sample_method="probabilistic",
    )
    target = SimpleNamespace(
        max_model_len=LONGEST, dtype=torch.float32, head_dtype=torch.float32, use_fp64_gumbel=False, hf_config=None
    )
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=target,
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            data_parallel_rank=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
    )


class _Stub(ModuleType):
    """A module of vLLM that has whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None})


def _load(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = vllm / FOLDER / "speculator.py"
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            parts = str(node.module).split(".")
            for end in range(1, len(parts) + 1):
                if (name := ".".join(parts[:end])) not in sys.modules:
                    monkeypatch.setitem(sys.modules, name, _Stub(name))
    vars(sys.modules["vllm.logger"])["init_logger"] = lambda name: None
    spec = spec_from_file_location("released_model_speculator", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
