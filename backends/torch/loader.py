"""Loads a `TargetModel` from a model reference: files, device, kernels, and a check of how it verifies drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.drafters.factory import DraftModel
from agentspec.backends.torch.model.attention import ATTENTION_NAME
from agentspec.backends.torch.model.compatibility import has_known_masks, max_exact_context, require_decoder
from agentspec.backends.torch.model.device import (
    choose_device,
    choose_dtype,
    choose_kernels,
    is_device_error,
    is_out_of_memory,
)
from agentspec.backends.torch.model.graphs.recording import record_graphs
from agentspec.backends.torch.model.layers.fused_norms import fuse_norms, unfuse_norms
from agentspec.backends.torch.model.layers.output_head import Float32Head
from agentspec.backends.torch.model.layers.packed_linear import pack_linears, unpack_linears
from agentspec.backends.torch.model.lora import merge_adapter, with_adapter
from agentspec.backends.torch.model.self_check import SelfCheck, StructureCheck
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter, hashes, read_tokenizer
from agentspec.errors import ConfigurationError, EngineStoppedError, ModelUnavailableError
from agentspec.types import Namespace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and the hashes that keep its cached tokens apart from other models'."""

    name: str
    target: TargetModel
    tokenizer: Any
    fingerprint: str
    tokenizer_hash: str
    template_hash: str
    packed: int
    adapter: str | None = None

    def namespace(self, tenant: str) -> Namespace:
        return Namespace(tenant, self.fingerprint, self.tokenizer_hash, self.template_hash)


def load(settings: TorchSettings) -> LoadedModel:
    """Find, read and prepare the model. Raises `ModelUnavailableError`, also if memory runs out, `ConfigurationError`,
    and `EngineStoppedError` if the device fails.
    """
    return _load(settings, settings.model, settings.adapter)


def load_draft(settings: TorchSettings, target: LoadedModel) -> DraftModel | None:
    """The draft model for `target`, if the settings name one and `target` can be rewound; raises like `load`.

    If both have the same vocabulary, it drafts in the target's token ids; else its drafts are translated through text.
    """
    if settings.draft_model is None or not target.target.rewindable:
        return None
    small = _load(settings, settings.draft_model, None)
    if not small.target.rewindable:
        message = f"{small.name!r} cannot draft: it keeps a state that cannot be rewound. Name another draft_model"
        raise ConfigurationError(message, param="draft_model")
    shared = small.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    tokenizers = None if shared else (TokenizerAdapter(target.tokenizer), TokenizerAdapter(small.tokenizer))
    logger.info("%s drafts, %s", small.name, "in the same tokens" if shared else "through text: its tokenizer differs")
    return DraftModel(small.name, small.target, tokenizers)


def _load(settings: TorchSettings, model: str, adapter: str | None) -> LoadedModel:
    from agentspec.backends.model_store import resolve

    files = resolve(model)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    fingerprint = with_adapter(files.fingerprint, adapter)
    tokenizer = read_tokenizer(files.folder)
    module = read_weights(files.folder, files.name, dtype)
    if adapter is not None:
        module = merge_adapter(module, adapter)
    try:
        loaded = prepare(module.to(device), tokenizer, name=files.name, fingerprint=fingerprint, adapter=adapter)
        if settings.cuda_graphs:
            record_graphs(loaded.target)
    except Exception as error:
        if is_out_of_memory(error):
            advice = "free some, or choose a smaller model or dtype"
            message = f"{files.name!r} does not fit into the memory of {str(device)!r}: {advice}"
            raise ModelUnavailableError(message) from error
        if is_device_error(error):
            message = f"the device {str(device)!r} failed: {type(error).__name__}; the process must be restarted"
            raise EngineStoppedError(message) from error
        raise
    return loaded


def read_weights(folder: Path, name: str, dtype: torch.dtype) -> Any:
    """The model in `folder`, on the CPU. Raises `ModelUnavailableError`, also if weights are missing."""
    try:
        require_decoder(AutoConfig.from_pretrained(folder), name)
        with quiet():
            read: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
        module, found = read
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelUnavailableError(f"cannot read the model in {str(folder)!r}: {error}") from error
    if missing := sorted(found["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelUnavailableError(f"{str(folder)!r} lacks {len(missing)} weights of the model, such as {missing[0]}")
    return module


def prepare(module: Any, tokenizer: Any, *, name: str, fingerprint: str, adapter: str | None = None) -> LoadedModel:
    """Pack the weights of a model in memory and choose its attention kernel, checking that it still computes the same.

    A model that cannot verify draft trees (recurrent state, unknown kind of attention) runs without speculation, with
    a warning in the log. Raises `ModelUnavailableError` for a model that cannot be decoded step by step at all.
    """
    module.eval()
    choose_kernels(module.device)
    if module.dtype != torch.float32:
        _float32_head(module)
    check = SelfCheck.of(module)
    if not check.logits.isfinite().all():
        dtype = str(module.dtype).removeprefix("torch.")
        raise ModelUnavailableError(f"{name!r} computes no finite numbers in {dtype}: set dtype to float32 or bfloat16")
    structure = StructureCheck.of(module)
    packed, fused = pack_linears(module), fuse_norms(module)
    target = choose_target(module, check, structure)
    if target is None and (packed or fused):
        unpack_linears(module)
        unfuse_norms(module)
        packed, target = 0, choose_target(module, check, structure)
    if target is None:
        reason = "its tokens, computed one after another, are not those of the whole text"
        raise ModelUnavailableError(f"the local engine cannot run {name!r} ({type(module).__name__}): {reason}")
    if not target.rewindable:
        logger.warning("%s keeps a state that cannot be rewound: it runs without speculation and prefix reuse", name)
    _limit_context(target, name)
    tokenizer_hash, template_hash = hashes(tokenizer)
    return LoadedModel(
        name=name,
        target=target,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        tokenizer_hash=tokenizer_hash,
        template_hash=template_hash,
        packed=packed,
        adapter=adapter,
    )


def _limit_context(target: TargetModel, name: str) -> None:
    bound = max_exact_context(target.module.config)
    if bound is not None and bound < target.context_length:
        reason = "behind them its positions change with the length of the text"
        logger.warning("%s takes texts of up to %d tokens: %s", name, bound, reason)
        target.context_length = bound


def choose_target(module: Any, check: SelfCheck, structure: StructureCheck | None) -> TargetModel | None:
    """The fastest way to run `module` that passes the checks; None if no way does."""
    own = module.config._attn_implementation
    if structure is not None and not structure.causal:
        return None
    for attention in (ATTENTION_NAME, own, "eager") if _may_rewind(module) else ():
        if structure is not None and not structure.passes(attention):
            continue
        module.set_attn_implementation(attention)
        target = TargetModel(module, rewindable=True)
        if check.passes(target):
            return target
    module.set_attn_implementation(own)
    target = TargetModel(module, rewindable=False)
    return target if check.passes(target) else None


def _may_rewind(module: Any) -> bool:
    """Whether the model keeps no state but its slots, and masks that are known."""
    return not getattr(module, "_is_stateful", False) and has_known_masks(module.config)


def _float32_head(module: Any) -> None:
    head = module.get_output_embeddings()
    if type(head) is nn.Linear:
        module.set_output_embeddings(Float32Head(head))


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars of transformers, which do not belong into a server's log."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
