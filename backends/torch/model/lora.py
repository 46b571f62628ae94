"""LoRA adapters: low-rank weight updates in a folder of their own, merged into the model when it is loaded.

Merged weights cost no time per token, can be packed and need no support in the engine, which switching adapters per
request would. peft does the merging, because it supports everything that an adapter's configuration can say
(rank-stabilised scales, DoRA, patterns, transposed layers, whole modules).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Set
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError, ModelUnavailableError, install_advice

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def merge_adapter(module: Any, name: str) -> Any:
    """`module` with the adapter in folder `name` added to its weights.

    Raises `ModelUnavailableError` for a folder that holds no adapter for this model, and `ConfigurationError` where
    peft is missing.
    """
    folder = checked(name)
    try:
        from peft import PeftModel
        from peft.utils import get_peft_model_state_dict
    except ImportError as error:
        raise ConfigurationError(f"adapters need peft ({error}); {install_advice('lora')}") from error
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            held = set(file.keys())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # left-out weights are checked below; the other warnings do not matter
            adapted = PeftModel.from_pretrained(module, str(folder))
        _require_same(held, get_peft_model_state_dict(adapted).keys(), folder)
        return adapted.merge_and_unload(safe_merge=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelUnavailableError(f"cannot apply the adapter in {name!r}: {error}") from error


def adapter_fingerprint(name: str) -> str:
    """A hexadecimal SHA-256 of the adapter's configuration and weights. Raises `ModelUnavailableError`."""
    from agentspec.backends.model_store.store import file_sha256

    folder = checked(name)
    return hashlib.sha256("".join(file_sha256(folder / file) for file in (CONFIG, WEIGHTS)).encode()).hexdigest()


def with_adapter(fingerprint: str, name: str | None) -> str:
    """The fingerprint of a model with its adapter, so that cached tokens of one are never drafted for another."""
    if name is None:
        return fingerprint
    return hashlib.sha256(f"{fingerprint}+{adapter_fingerprint(name)}".encode()).hexdigest()


def checked(name: str) -> Path:
    """The folder `name`, checked to hold a LoRA adapter as safetensors. Raises `ModelUnavailableError`."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ModelUnavailableError(f"no adapter folder {name!r}: name a folder that holds {CONFIG} and {WEIGHTS}")
    try:
        kind = json.loads((folder / CONFIG).read_text()).get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelUnavailableError(f"{name!r} has no readable {CONFIG}; it is no adapter folder") from error
    if kind != "LORA":
        raise ModelUnavailableError(f"the adapter in {name!r} is of type {kind!r}; only LORA adapters can be merged")
    if not (folder / WEIGHTS).is_file():
        hint = ": adapter_model.bin is a pickle, which runs code when it is read; convert it"
        reason = hint if (folder / "adapter_model.bin").exists() else ""
        raise ModelUnavailableError(f"{name!r} holds no {WEIGHTS}{reason}")
    return folder


def _require_same(held: Set[str], used: Set[str], folder: Path) -> None:
    """Check that peft used all weights in the file and no others: it would skip weights with only a warning."""
    if odd := sorted(held ^ used):
        where = "the adapter" if odd[0] in held else "the model"
        raise ValueError(f"{odd[0]} is in {where} only; was it made for this model? ({len(odd)} such, {folder.name})")
