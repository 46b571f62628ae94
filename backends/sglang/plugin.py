"""The plug-in that SGLang loads in each of its processes: it makes SGLang's NGRAM algorithm draft from our cache."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentspec.backends.engine_plugin.cache_router import close_at_exit, open_router
from agentspec.backends.engine_plugin.settings import enabled, read_settings
from agentspec.backends.engine_plugin.source_contract import Requirement, missing
from agentspec.backends.sglang.corpus import TokenCacheCorpus
from agentspec.backends.sglang.drafting import TreeDrafter

ENGINE = "SGLANG"
"""The name in the settings' environment variables."""

_SPECULATIVE = "sglang.srt.speculative"
_WORKER = f"{_SPECULATIVE}.ngram_worker"
_REQUEST_PARTS = (
    "rid origin_input_ids_unpadded output_ids output_ids_through_stop finished finished_reason".split()
    + "sampling_params input_embeds session session_id cache_salt extra_key lora_id".split()
)
_CORPUS_METHODS = (
    "batch_put synchronize load_external_corpus_named commit_external_corpus_load remove_external_corpus".split()
    + "list_external_corpora reset batch_get erase_match_state".split()
)
REQUIREMENTS = (
    Requirement("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    Requirement("sglang.srt.plugins.hook_registry", "HookType", ("AROUND",)),
    Requirement(f"{_SPECULATIVE}.spec_info", "SpeculativeAlgorithm.create_worker", ("server_args",)),
    Requirement(_WORKER, "NgramCorpus"),
    Requirement(_WORKER, "NGRAMWorker", ("ngram_corpus",)),
    Requirement(_WORKER, "NGRAMWorker.__init__", ("server_args", "gpu_id", "nccl_port", "target_worker")),
    Requirement(_WORKER, "NGRAMWorker._prepare_draft_tokens", ("batch",)),
    Requirement(f"{_SPECULATIVE}.base_spec_worker", "BaseSpecWorker.note_request_finished"),
    Requirement(f"{_SPECULATIVE}.cpp_ngram.ngram_corpus", "NgramCorpus", tuple(_CORPUS_METHODS)),
    Requirement(
        f"{_SPECULATIVE}.cpp_ngram.ngram_corpus", "NgramCorpus.batch_get", ("req_ids", "batch_tokens", "total_lens")
    ),
    Requirement("sglang.srt.managers.schedule_batch", "Req", tuple(_REQUEST_PARTS)),
    Requirement("sglang.srt.managers.schedule_batch", "BaseFinishReason", ("to_json",)),
    Requirement("sglang.srt.managers.schedule_batch", "ScheduleBatch", ("reqs",)),
    Requirement("sglang.srt.sampling.sampling_params", "SamplingParams", ("custom_params",)),
    Requirement("sglang.srt.distributed.parallel_state", "get_tp_group"),
    Requirement(
        "sglang.srt.distributed.parallel_state",
        "GroupCoordinator",
        ("world_size", "rank_in_group", "broadcast_object"),
    ),
    Requirement("sglang.srt.runtime_context", "get_parallel"),
    Requirement("sglang.srt.runtime_context", "get_serving"),
    Requirement("sglang.srt.runtime_context", "get_model"),
    Requirement("sglang.srt.model_executor.model_runner", "ModelRunner", ("lora_manager",)),
    Requirement("sglang.srt.lora.lora_manager", "LoRAManager", ("lora_refs",)),
    Requirement("sglang.srt.configs.model_config", "ModelConfig", ("hf_config", "vocab_size")),
)
"""What the drafter calls, replaces or reads inside SGLang."""

logger = logging.getLogger(__name__)


def install() -> None:
    """Entry point of `sglang.srt.plugins`."""
    if not enabled(ENGINE):
        return
    import sglang  # pyright: ignore[reportMissingImports]

    if lacking := missing(Path(sglang.__path__[0]), REQUIREMENTS):
        logger.warning("agentspec leaves SGLang alone: SGLang %s has no %s", version("sglang"), ", ".join(lacking))
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(
        f"{_SPECULATIVE}.spec_info.SpeculativeAlgorithm.create_worker", create_worker, HookType.AROUND
    )


def create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """The class of the worker that drafts for a scheduler: SGLang's own unless that is the NGRAM worker."""
    chosen = original(algorithm, server_args)
    if (chosen.__module__, chosen.__name__) != (_WORKER, "NGRAMWorker"):
        return chosen
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    if get_parallel().pp_size > 1:
        logger.warning("agentspec leaves NGRAM alone: it does not draft with pipeline parallelism")
        return chosen
    return worker_with_cache(chosen)


def worker_with_cache(base: Any) -> Any:
    """A subclass of SGLang's `NGRAMWorker` that drafts from the token cache."""

    class TokenCacheWorker(base):  # type: ignore[misc]
        def __init__(self, server_args: Any, gpu_id: Any, nccl_port: Any, target_worker: Any, **more: Any) -> None:
            module = vars(sys.modules[base.__module__])
            theirs = module["NgramCorpus"]
            module["NgramCorpus"] = lambda **options: open_corpus(target_worker.model_runner, **options)
            try:
                super().__init__(server_args, gpu_id, nccl_port, target_worker, **more)
            finally:
                module["NgramCorpus"] = theirs

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            with self.ngram_corpus.recorded_later():
                self.ngram_corpus.see(batch.reqs)
                return super()._prepare_draft_tokens(batch)

        def note_request_finished(self, *, rid: str, **more: Any) -> None:
            super().note_request_finished(rid=rid, **more)
            self.ngram_corpus.finish(rid)

    return TokenCacheWorker


def open_corpus(runner: Any, *, max_bfs_breadth: int, **sizes: Any) -> TokenCacheCorpus:
    """The corpus of this rank for SGLang's `ModelRunner`, by the options of SGLang's own; those that size its trie have
    no effect. With a breadth of 1 it drafts chains: much of SGLang's attention then reads no tree's mask.

    Raises `ConfigurationError` and `CacheError`s.
    """
    from sglang.srt.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]

    group = get_tp_group()
    drafter = _open_drafter(runner.model_config, chains=max_bfs_breadth == 1) if group.rank_in_group == 0 else None
    corpus = TokenCacheCorpus(drafter, group, adapter_path=partial(_adapter_path, runner), **sizes)
    close_at_exit(corpus.close)
    return corpus


def _adapter_path(runner: Any, adapter: str) -> str:
    """The folder of a LoRA adapter; its id is another at each start."""
    loaded = runner.lora_manager.lora_refs.get(adapter) if runner.lora_manager else None
    return (loaded and loaded.lora_path) or ""


def _open_drafter(model: Any, *, chains: bool) -> Callable[..., TreeDrafter]:
    from sglang.srt.runtime_context import get_model, get_serving  # pyright: ignore[reportMissingImports]

    tokenizer = get_serving().tokenizer_path or get_model().model_path
    described = SimpleNamespace(hf_config=model.hf_config, tokenizer=tokenizer, tokenizer_revision=get_model().revision)
    router = open_router(read_settings(ENGINE), described, "in the place of NGRAM")
    return partial(TreeDrafter, router.open, int(model.vocab_size), chains=chains, on_close=router.close)
