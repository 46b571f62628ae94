"""Loads a model from a model reference: files, device, kernels, a check of how it verifies drafts, and its costs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.drafters.draft_model import DraftModel
from agentspec.backends.torch.model.batch import ATTENTION_NAME, BatchItem
from agentspec.backends.torch.model.device import is_device_error, is_out_of_memory, synchronize
from agentspec.backends.torch.model.graphs.recording import record_graphs
from agentspec.backends.torch.model.replacements import Float32Head, replace_layers, restore_layers
from agentspec.backends.torch.model.self_check import SelfCheck, StructureCheck
from agentspec.backends.torch.model.target import TargetModel, layer_windows, rotaries
from agentspec.backends.torch.text.model_text import hashes, read_tokenizer
from agentspec.errors import ConfigurationError, EngineStoppedError, ModelUnavailableError
from agentspec.types import Namespace

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and the hashes that keep its cached tokens apart from other models'."""

    name: str
    target: TargetModel
    tokenizer: Any
    fingerprint: str
    tokenizer_hash: str
    template_hash: str

    def namespace(self, tenant: str) -> Namespace:
        return Namespace(tenant, self.fingerprint, self.tokenizer_hash, self.template_hash)


def load(settings: TorchSettings) -> LoadedModel:
    """Find, read and prepare the model. Raises `ModelUnavailableError`, also if memory runs out, `ConfigurationError`,
    and `EngineStoppedError` if the device fails.
    """
    return _load(settings, settings.model)


def load_draft(settings: TorchSettings, target: LoadedModel) -> DraftModel | None:
    """The draft model for `target`, if the settings name one. Raises like `load`, and `ConfigurationError` for one that
    has another vocabulary.
    """
    if settings.draft_model is None:
        return None
    small = _load(settings, settings.draft_model)
    if small.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        advice = "set draft_model to a smaller model of its family"
        raise ConfigurationError(
            f"the draft model {small.name!r} has another vocabulary than {target.name!r}: {advice}"
        )
    return DraftModel(small.name, small.target)


def _load(settings: TorchSettings, model: str) -> LoadedModel:
    from agentspec.backends.model_store import resolve

    files = resolve(model)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    logger.info("reading %s, %s on %s", files.name, str(dtype).removeprefix("torch."), device)
    tokenizer = read_tokenizer(files.folder)
    module = read_weights(files.folder, files.name, dtype)
    try:
        logger.info("checking that %s computes the same with drafts", files.name)
        loaded = prepare(module.to(device), tokenizer, name=files.name, fingerprint=files.fingerprint)
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


def prepare(module: Any, tokenizer: Any, *, name: str, fingerprint: str) -> LoadedModel:
    """Pack the weights of a model in memory and choose its attention kernel, checking that it still computes the same.

    Raises `ModelUnavailableError` for a model that cannot verify draft trees (recurrent state, unknown kind of
    attention).
    """
    module.eval()
    choose_kernels(module.device)
    head = module.get_output_embeddings()
    if module.dtype != torch.float32 and type(head) is nn.Linear:
        module.set_output_embeddings(Float32Head(head))
    check = SelfCheck.of(module)
    if not check.logits.isfinite().all():
        dtype = str(module.dtype).removeprefix("torch.")
        raise ModelUnavailableError(f"{name!r} computes no finite numbers in {dtype}: set dtype to float32 or bfloat16")
    structure = StructureCheck.of(module)
    replaced = replace_layers(module)
    target = choose_target(module, check, structure)
    if target is None and replaced:
        restore_layers(module)
        target = choose_target(module, check, structure)
    if target is None:
        reason = "it keeps a state that cannot be rewound, or its attention has limits that are not known here"
        advice = "serve it by vLLM or SGLang, and name that server as the backend"
        message = f"the local engine cannot run {name!r} ({type(module).__name__}): {reason}; {advice}"
        raise ModelUnavailableError(message)
    bound = max_exact_context(module.config)
    if bound is not None and bound < target.context_length:
        reason = "behind them its positions change with the length of the text"
        logger.warning("%s takes texts of up to %d tokens: %s", name, bound, reason)
        target.context_length = bound
    return LoadedModel(name, target, tokenizer, fingerprint, *hashes(tokenizer))


def choose_target(module: Any, check: SelfCheck, structure: StructureCheck | None) -> TargetModel | None:
    """The fastest way to run `module` that passes the checks; None if no way does."""
    own, stateful = module.config._attn_implementation, getattr(module, "_is_stateful", False)
    if stateful or not has_known_masks(module.config) or (structure is not None and not structure.causal):
        return None
    for attention in (ATTENTION_NAME, own, "eager"):
        if structure is not None and not structure.passes(attention):
            continue
        module.set_attn_implementation(attention)
        target = TargetModel(module)
        if check.passes(target):
            return target
    module.set_attn_implementation(own)
    return None


def choose_device(name: str) -> torch.device:
    """The device named `name`; `auto` is a CUDA device if there is one, else the CPU. Raises `ConfigurationError` for
    a device that cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {name!r} cannot be used here: {reason}", param="device") from error
    if device.type == "meta":
        raise ConfigurationError("device 'meta' holds no numbers: use auto, cpu, cuda or mps", param="device")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype named `name`. `auto` is float32 on a CPU, whose bfloat16 kernels are slow or missing; elsewhere it is
    bfloat16, or float16 if the device only emulates bfloat16. Raises `ConfigurationError` for an unknown name, and for
    float16 on a CPU.
    """
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        native = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    if name not in DTYPES:
        raise ConfigurationError(f"dtype must be auto or one of {sorted(DTYPES)}, not {name!r}", param="dtype")
    if name == "float16" and device.type == "cpu":
        message = "float16 has no fast kernels on a CPU: use float32, or bfloat16 to halve the memory"
        raise ConfigurationError(message, param="dtype")
    return DTYPES[name]


def choose_kernels(device: torch.device) -> None:
    """Disable cuDNN attention for the whole process, since it makes a new plan for every number of slots."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


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


LIMITS = ("attention_chunk_size", "attention_window_size", "local_attention", "window_size")


def require_decoder(config: Any, name: str) -> None:
    """Raise `ModelUnavailableError` for a model that does not continue a text token by token."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        message = f"{name!r} is an encoder-decoder model ({kind}); the local engine runs decoder-only models"
        raise ModelUnavailableError(message)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnavailableError(f"{name!r} is no language model that continues text: its type is {kind!r}")


def has_known_masks(config: Any) -> bool:
    """Whether each layer's mask follows from its kind and `sliding_window` alone, as the masks built here assume.

    A limit under another name (chunks, local windows inside the layers) would give wrong results in long texts only,
    where the self-check does not see it.
    """
    text = config.get_text_config()
    return layer_windows(text) is not None and not any(getattr(text, name, None) for name in LIMITS)


def max_exact_context(config: Any) -> int | None:
    """The longest context within which rotary angles do not depend on a forward's length; None for no such limit.

    LongRoPE has two sets of angles and chooses one by a forward's longest position. Slots computed earlier, or together
    with a draft, would then differ from those of a run without drafts. (The dynamic kind changes only beyond the
    model's context.)
    """
    ropes = [rope for rope in rotaries(config.get_text_config()) if rope.get("rope_type") == "longrope"]
    bounds = [rope["original_max_position_embeddings"] for rope in ropes]
    return min(bounds, default=None)


SIZES = (1, 2, 4, 8, 16, 32, 48)
FAR = 1024  # KV slots of the long context
PASSES = 3
SEQUENCES = (4, 8)  # sequences in one forward


@torch.inference_mode()
def measure_costs(
    target: TargetModel, limit_seconds: float = 2.0
) -> tuple[list[tuple[int, int, float]], list[tuple[int, float]]]:
    """Time forwards of every size in `SIZES`, and of one token for each of several sequences, as far as the limit
    allows. Returns samples (tokens, context, seconds), at least one, and (sequences, seconds).
    """
    started = perf_counter()
    cache = target.new_cache(FAR + max(SIZES))
    _timed(target, [BatchItem(cache, [0])])  # the first forward of a kind takes longer
    sizes = [size for size in SIZES if size <= target.context_length]
    far, several = min(FAR, target.context_length - max(sizes)), min(16, max(sizes))
    costs, batches = list[tuple[int, int, float]](), list[tuple[int, float]]()
    alone = [*((1, size, 0) for size in sizes), (1, 1, far), (1, several, far)]
    for sequences, tokens, context in [*alone, *((count, 1, 0) for count in SEQUENCES if target.batched)] * PASSES:
        if costs and perf_counter() - started > limit_seconds:
            break
        if sequences > 1:
            seconds = _timed(target, [BatchItem(target.new_cache(1), [0]) for _ in range(sequences)])
            batches.append((sequences, seconds))
        else:
            cache.fill_blank(context)
            seconds = _timed(target, [BatchItem(cache, [0], [0] * (tokens - 1), range(-1, tokens - 2))])
            costs.append((tokens, context, seconds))
    return costs, batches


def _timed(target: TargetModel, items: Sequence[BatchItem]) -> float:
    synchronize(target.device)
    started = perf_counter()
    target.forward_batch(items)[0][0, 0].item()
    return perf_counter() - started
