"""Puts our speculator in the place of vLLM's n-gram speculator in Model Runner V2, or next to a model's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from agentspec.backends.engine_plugin.settings import enabled
from agentspec.backends.engine_plugin.source_contract import Requirement, missing
from agentspec.backends.vllm.proposer import ENGINE, STRICT, offer_forget

SWITCH = f"{ENGINE}_V2"
METHODS = ("ngram", "ngram_gpu")  # of vLLM, which its second runner gives to the speculator that ours replaces
_NGRAM = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_PROPOSE = (
    "input_batch",
    "attn_metadata",
    "slot_mappings",
    "last_hidden_states",
    "aux_hidden_states",
    "num_sampled",
    "num_rejected",
)
_SPECULATOR = ("max_num_reqs", "max_model_len", "num_speculative_steps", "req_states", "device")
_BATCH = ("req_ids", "num_reqs", "idx_mapping", "idx_mapping_np")
REQUIREMENTS = (
    Requirement(_NGRAM, "NgramGPUSpeculator", _SPECULATOR),
    Requirement(_NGRAM, "NgramGPUSpeculator.__init__", ("vllm_config", "device", "req_states")),
    Requirement(_NGRAM, "NgramGPUSpeculator.propose", _PROPOSE),
    Requirement(_RUNNER, "GPUModelRunner", ("speculator", "req_states")),
    Requirement(_RUNNER, "GPUModelRunner.add_requests", ("scheduler_output",)),
    Requirement(_RUNNER, "GPUModelRunner.finish_requests", ("scheduler_output",)),
    Requirement(_RUNNER, "GPUModelRunner.shutdown"),
    Requirement("vllm.v1.worker.gpu.states", "RequestState", ("all_token_ids", "total_len", "req_id_to_index")),
    Requirement("vllm.v1.worker.gpu.input_batch", "InputBatch", _BATCH),
    Requirement("vllm.v1.worker.gpu.buffer_utils", "StagedWriteTensor", ("gpu",)),
    Requirement("vllm.v1.core.sched.output", "NewRequestData", ("prompt_token_ids", "prefill_token_ids")),
    Requirement("vllm.v1.core.sched.output", "SchedulerOutput", ("preempted_req_ids", "finished_req_ids")),
    Requirement("vllm.config.vllm", "VllmConfig.use_v2_model_runner"),
    Requirement("vllm.config.parallel", "ParallelConfig", ("prefill_context_parallel_size",)),
    Requirement("vllm.distributed.parallel_state", "GroupCoordinator.broadcast", ("input_", "src")),
)
"""What the speculator calls, replaces or reads inside vLLM, beyond what `vllm/plugin.py` requires."""

_VERIFIED = ("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping")
_STATES = ("expanded_idx_mapping", "expanded_local_pos", "temperature", "seed", "num_speculative_steps")
_DRAWN = ("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting")
STRICT_REQUIREMENTS = (
    Requirement("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "rejection_sample"),
    Requirement("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils", "rejection_sample", (*_VERIFIED, *_STATES)),
    Requirement("vllm.v1.worker.gpu.sample.gumbel", "gumbel_sample", _DRAWN),
    Requirement("vllm.config.speculative", "SpeculativeConfig", ("rejection_sample_method",)),
)
"""What `verification.py` calls and replaces."""

HYBRID_SWITCH = f"{ENGINE}_HYBRID"
BESIDE = "agentspec_beside"
"""Attribute of vLLM's speculator that holds ours."""
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_MODEL = f"{_SPECULATORS}.speculator"
_CONFIDENCE = ("enable_adaptive_verification", "draft_token_confidence_probs")
_MODEL_SPECULATOR = ("draft_logits", "max_num_reqs", "max_model_len", "num_speculative_steps", "device")
HYBRID_REQUIREMENTS = (
    *(needed for needed in REQUIREMENTS if needed.module not in (_NGRAM,)),
    *STRICT_REQUIREMENTS,
    Requirement(_SPECULATORS, "init_speculator", ("vllm_config", "device", "req_states")),
    Requirement(_RUNNER, "init_speculator"),
    Requirement(_MODEL, "BaseSpeculator.propose", _PROPOSE),
    Requirement(_MODEL, "DraftModelSpeculator", (*_MODEL_SPECULATOR, "draft_watermarker", *_CONFIDENCE)),
)
"""What our drafts next to a model's call, replace or read inside vLLM."""

logger = logging.getLogger(__name__)


def package() -> Path:
    """The folder of vLLM's source."""
    return Path(import_module("vllm").__path__[0])


def take_over() -> None:
    """Replace vLLM's n-gram speculator, in this process, by ours."""
    module = import_module(_NGRAM)
    theirs: Any = module.NgramGPUSpeculator

    def make(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            logger.warning("agentspec leaves Model Runner V2 alone: it does not draft with prefill context parallelism")
            return theirs(vllm_config, device, req_states)
        from agentspec.backends.vllm.runner_v2.speculator import PassageSpeculator  # which imports torch

        listen_to_scheduler()
        ours: Any = type("PassageSpeculator", (PassageSpeculator, theirs), {})
        made = ours(vllm_config, device, req_states)
        made.seeded = verify_strictly(vllm_config)
        return made

    module.NgramGPUSpeculator = make  # type: ignore[attr-defined]


def verify_strictly(vllm_config: Any, draft_logits: Any = None) -> bool:
    """Have drafts verified by the target's own draws, if the operator wants that. Returns whether requests with a seed
    may have drafts: where that is not possible they have none of ours.
    """
    if not enabled(STRICT):
        return True
    lacking = missing(package(), STRICT_REQUIREMENTS)
    if draft_logits is not None:
        reason = "its drafter samples (draft_sample_method)"
    elif (method := vllm_config.speculative_config.rejection_sample_method) != "standard":
        reason = f"rejection_sample_method is {method!r}"
    elif getattr(vllm_config, "watermark_config", None) is not None:
        reason = "answers are watermarked"
    elif lacking:
        reason = f"it has no {', '.join(lacking)}"
    else:
        from agentspec.backends.vllm.runner_v2.verification import strict_rejection

        strict_rejection().strict = True
        return True
    logger.warning(
        "agentspec drafts nothing for requests with a seed, whose text would change in this vLLM: %s", reason
    )
    return False


def join_models() -> None:
    """Let our drafts, in this process, stand next to those of each model speculator that vLLM makes."""
    module = import_module(_SPECULATORS)
    original = module.init_speculator

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        made = original(vllm_config, device, req_states)
        base = import_module(_MODEL).DraftModelSpeculator
        return join_model(made, vllm_config, req_states) if isinstance(made, base) else made

    module.init_speculator = init_speculator  # type: ignore[attr-defined]
    if runner := sys.modules.get(_RUNNER):  # it has imported the name already
        vars(runner)["init_speculator"] = init_speculator


def join_model(made: Any, vllm_config: Any, req_states: Any) -> Any:
    """Have a speculator of vLLM's draft from our cache too; leaves it alone, and says so, where that is not exact."""
    from agentspec.backends.vllm.runner_v2.hybrid import HybridSpeculator

    reasons = {
        "its drafts are watermarked": getattr(made, "draft_watermarker", None) is not None,
        "prefill context parallelism": vllm_config.parallel_config.prefill_context_parallel_size > 1,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        logger.warning("agentspec leaves vLLM's %s alone: %s", type(made).__name__, ", ".join(found))
        return made
    listen_to_scheduler()
    beside = HybridSpeculator(made, vllm_config, req_states)
    beside.seeded = verify_strictly(vllm_config, made.draft_logits)
    made.propose = beside.propose
    setattr(made, BESIDE, beside)
    return made


def listen_to_scheduler() -> None:
    """Make vLLM's second model runner tell our speculator which requests a step begins and ends, and its own end."""
    offer_forget()
    runner = import_module(_RUNNER).GPUModelRunner
    if runner.add_requests.__module__ != __name__:
        runner.add_requests = _after(runner.add_requests, lambda ours, output: ours.begin(output.scheduled_new_reqs))
        runner.finish_requests = _after(
            runner.finish_requests,
            lambda ours, output: ours.finish(output.finished_req_ids, output.preempted_req_ids or ()),
        )
        runner.shutdown = _after(runner.shutdown, lambda ours: ours.close())


def _after(original: Callable[..., Any], hook: Callable[..., None]) -> Callable[..., Any]:
    """`original`, with `hook` called after it for runners with a speculator of ours."""
    from agentspec.backends.vllm.runner_v2.speculator import PassageSpeculator

    def method(self: Any, *given: Any) -> Any:
        speculator = getattr(self, "speculator", None)
        result = original(self, *given)
        ours = getattr(speculator, BESIDE, speculator)
        if isinstance(ours, PassageSpeculator):
            hook(ours, *given)
        return result

    return method
