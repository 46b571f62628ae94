"""The plug-in that vLLM loads in each of its processes: it makes vLLM's suffix method draft from our cache."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from prometheus_client import Gauge

from agentspec.backends.engine_plugin.cache_router import new_policy
from agentspec.backends.engine_plugin.settings import POLICIES, default_config, enabled, read_settings
from agentspec.backends.engine_plugin.source_contract import Requirement, missing
from agentspec.backends.vllm.proposer import ENGINE, SALT, STRICT, SuffixDecodingProposer
from agentspec.backends.vllm.runner_v2 import plugin as runner_v2
from agentspec.version import __version__

logger = logging.getLogger(__name__)

METRIC = "agentspec_vllm_drafter_info"
OURS, ARCTIC, NONE = "agentspec", "arctic", "none"
_OUTPUT = "vllm.v1.core.sched.output"
_REQUEST_FIELDS = ("req_id", "prompt_token_ids", "prompt_embeds", "sampling_params", "lora_request")
_SAMPLING = ("extra_args", "eos_token_id", "stop", "stop_token_ids", "max_tokens", "seed", "temperature")
METRICS = Requirement("vllm.v1.metrics.loggers", "PrometheusStatLogger", ("log_engine_initialized", "vllm_config"))
REQUIREMENTS = (
    Requirement("vllm.config.speculative", "has_arctic_inference"),
    Requirement("vllm.config.speculative", "SpeculativeConfig", ("suffix_decoding_min_token_prob",)),
    Requirement("vllm.v1.spec_decode.suffix_decoding", "SuffixDecodingProposer.__init__", ("vllm_config",)),
    Requirement(
        "vllm.v1.spec_decode.suffix_decoding",
        "SuffixDecodingProposer.propose",
        ("num_speculative_tokens", "input_batch", "sampled_token_ids"),
    ),
    Requirement(_OUTPUT, "NewRequestData", _REQUEST_FIELDS),
    Requirement(_OUTPUT, "NewRequestData.from_request", ("request",)),
    Requirement(_OUTPUT, "SchedulerOutput", ("scheduled_new_reqs", "finished_req_ids")),
    Requirement(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch",
        ("req_ids", "req_id_to_index", "num_tokens_no_spec", "token_ids_cpu"),
    ),
    Requirement("vllm.v1.worker.gpu_model_runner", "SuffixDecodingProposer"),
    Requirement("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("drafter", "input_batch")),
    Requirement("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states", ("scheduler_output",)),
    Requirement("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.shutdown"),
    Requirement("vllm.v1.worker.worker_base", "WorkerBase"),
    Requirement("vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens"),
    Requirement("vllm.v1.request", "Request", ("cache_salt",)),
    Requirement("vllm.sampling_params", "SamplingParams", _SAMPLING),
    Requirement("vllm.config.model", "ModelConfig", ("hf_config", "tokenizer", "tokenizer_revision", "max_model_len")),
    Requirement("vllm.config.model", "ModelConfig.get_vocab_size"),
    Requirement("vllm.config.parallel", "ParallelConfig", ("distributed_executor_backend",)),
    Requirement("vllm.distributed.parallel_state", "get_tp_group"),
    Requirement("vllm.distributed.parallel_state", "model_parallel_is_initialized"),
    Requirement("vllm.distributed.parallel_state", "GroupCoordinator", ("rank_in_group", "world_size")),
    Requirement("vllm.distributed.parallel_state", "GroupCoordinator.broadcast_object", ("obj", "src")),
    Requirement("vllm.engine.arg_utils", "EngineArgs.create_speculative_config"),
    Requirement("vllm.v1.engine.core", "EngineCore.reset_prefix_cache"),
    Requirement("vllm.v1.engine.core", "EngineCore", ("model_executor",)),
)
"""What the drafter calls, replaces or reads inside vLLM."""

_installed = False


def install() -> None:
    """Entry point of `vllm.general_plugins`. Adds a metric that names the drafter, whichever method is in use."""
    global _installed
    if _installed:
        return
    wanted, wanted_v2 = enabled(ENGINE), enabled(runner_v2.SWITCH)
    wanted_hybrid = enabled(runner_v2.HYBRID_SWITCH, default=False)
    enabled(STRICT)  # raises now, not when a drafter is made
    _installed = True
    _log_as_vllm_does()
    took_over = wanted and _has("suffix method", REQUIREMENTS)
    if took_over:
        _accept_without_arctic()
        _replace_proposer()
        _carry_salts()
        if config := default_config(ENGINE):
            _speculate_by_default(config)
        if os.environ.get(POLICIES):
            _follow_weights()
    took_over_v2 = took_over and wanted_v2 and _has("Model Runner V2", runner_v2.REQUIREMENTS)
    if took_over_v2:
        runner_v2.take_over()
    if took_over and wanted_hybrid and _has("model drafters", runner_v2.HYBRID_REQUIREMENTS):
        runner_v2.join_models()
    if not missing(runner_v2.package(), [METRICS]):
        publish_with_metrics(took_over=took_over, took_over_v2=took_over_v2)


def _has(what: str, requirements: Sequence[Requirement]) -> bool:
    """Whether this vLLM has all that our drafter needs in the place of `what`; logs what it lacks."""
    if lacking := missing(runner_v2.package(), requirements):
        logger.warning("agentspec leaves vLLM's %s alone: vLLM %s has no %s", what, version("vllm"), ", ".join(lacking))
    return not lacking


def _log_as_vllm_does() -> None:
    """Have vLLM's handlers take our records: an engine in a program's own process gets them after its plug-ins."""
    if not (ours := logging.getLogger("agentspec")).handlers:
        ours.parent = logging.getLogger("vllm")


def _accept_without_arctic() -> None:
    """Make vLLM accept the suffix method without Arctic Inference, and check our settings at the same moment."""
    from vllm.config import speculative  # pyright: ignore[reportMissingImports]

    def answered_here() -> bool:
        read_settings(ENGINE)  # raises an error that tells the operator what to correct
        return True

    speculative.has_arctic_inference = answered_here


def _replace_proposer() -> None:
    from vllm.v1.spec_decode import suffix_decoding  # pyright: ignore[reportMissingImports]

    suffix_decoding.SuffixDecodingProposer = SuffixDecodingProposer
    if runner := sys.modules.get("vllm.v1.worker.gpu_model_runner"):  # it has imported the name already
        vars(runner)["SuffixDecodingProposer"] = SuffixDecodingProposer


def _carry_salts() -> None:
    """Send each new request's `cache_salt` to the workers, as an attribute: vLLM's own message leaves it out."""
    from vllm.v1.core.sched.output import NewRequestData  # pyright: ignore[reportMissingImports]

    original = NewRequestData.from_request.__func__

    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        data = original(cls, request, *args, **kwargs)
        setattr(data, SALT, request.cache_salt)
        return data

    NewRequestData.from_request = classmethod(from_request)


def _speculate_by_default(config: dict[str, Any]) -> None:
    """Have engines speculate that a program makes without a `speculative_config`, as trainers do."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    original = EngineArgs.create_speculative_config

    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.speculative_config = dict(config) if self.speculative_config is None else self.speculative_config
        return original(self, *args, **kwargs)

    EngineArgs.create_speculative_config = create_speculative_config


def _follow_weights() -> None:
    """Have the drafters learn of new weights: trainers then reset an engine's prefix cache or name a version."""
    from vllm.v1.engine.core import EngineCore  # pyright: ignore[reportMissingImports]

    for name in ("reset_prefix_cache", "set_weight_version"):
        if original := getattr(EngineCore, name, None):
            setattr(EngineCore, name, _then_new_policy(original))


def _then_new_policy(original: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        self.model_executor.collective_rpc(new_policy)
        return result

    return method


def drafter_of(speculative: Any, *, took_over: bool, took_over_v2: bool = False) -> str:
    """The drafter's name by vLLM's `SpeculativeConfig`, if any.

    `took_over`: our drafter replaced the suffix method; `took_over_v2`: ours replaced the n-gram method of the model
    runner in use.
    """
    if speculative is None:
        return NONE
    if speculative.method == "suffix":
        return OURS if took_over else ARCTIC
    return OURS if took_over_v2 and speculative.method in runner_v2.METHODS else str(speculative.method)


def publish(speculative: Any, *, took_over: bool, took_over_v2: bool = False) -> None:
    """Set the drafter metric in this process. Idempotent."""
    method = "" if speculative is None else str(speculative.method)
    drafter = drafter_of(speculative, took_over=took_over, took_over_v2=took_over_v2)
    _gauge().labels(drafter, method, __version__).set(1)


def publish_with_metrics(*, took_over: bool, took_over_v2: bool) -> None:
    """Make vLLM publish the drafter metric with its own metrics, in the process that serves them, if it serves any."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger  # pyright: ignore[reportMissingImports]

    original = PrometheusStatLogger.log_engine_initialized

    def log_engine_initialized(self: Any) -> None:
        original(self)
        config = self.vllm_config
        in_use = took_over_v2 and config.use_v2_model_runner
        publish(config.speculative_config, took_over=took_over, took_over_v2=in_use)

    PrometheusStatLogger.log_engine_initialized = log_engine_initialized


@cache
def _gauge() -> Gauge:
    """An info metric: always 1, with the information in its labels, the same in all processes of a server."""
    labels = ("drafter", "method", "version")
    return Gauge(METRIC, "Who drafts for this server", labels, multiprocess_mode="mostrecent")
