"""Resolves a user's model reference to a folder that the engine can load."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from agentspec.backends.model_store.builtin import BUILTIN, Builtin, download
from agentspec.backends.model_store.store import (
    compute_sha256,
    file_sha256,
    fingerprint,
    is_prepared,
    locked,
    prepare,
    store_folder,
)
from agentspec.errors import ModelUnavailableError, install_advice, suggestion

ALLOWED = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")  # never pickles, and no code
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model ready for `from_pretrained(folder)`.

    `fingerprint` is a SHA-256 in hexadecimal that changes when the weights do; it is part of the cache namespace.
    """

    name: str
    folder: Path
    fingerprint: str


def resolve(ref: str) -> ModelFiles:
    """The files of a built-in name, local folder, GGUF file or model-hub id, fetched and converted if needed.

    Safe to call from several processes at once. Raises `ModelUnavailableError` saying how to provide the model.
    """
    if model := BUILTIN.get(ref):
        return _builtin(model)
    path = Path(ref).expanduser()
    if path.exists():
        gguf = _only_gguf(path)
        return _checked_folder(ref, path) if gguf is None else _gguf(ref, gguf)
    require_known(ref)
    return _checked_folder(ref, snapshot(ref))


def require_known(ref: str) -> None:
    """Raises `ModelUnavailableError` for what is no built-in name, no path that exists and no model-hub id."""
    if ref in BUILTIN or Path(ref).expanduser().exists() or is_hub_id(ref):
        return
    raise ModelUnavailableError(
        f"no model {ref!r}{suggestion(ref, BUILTIN) or '.'} Give a built-in name"
        f" ({', '.join(BUILTIN)}), an existing folder or .gguf file, or a model-hub id such as 'org/name'"
    )


def is_hub_id(ref: str) -> bool:
    """Whether `ref` has the shape of a hub id, `org/name`."""
    return _ID.fullmatch(ref) is not None


def snapshot(repository: str) -> Path:
    """Download the needed files of `repository`, or find them in the hub client's own cache; returns their folder.

    Raises `ModelUnavailableError` if neither works.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelUnavailableError(f"model-hub ids need huggingface_hub; {install_advice('torch')}") from None
    try:
        return Path(snapshot_download(repository, allow_patterns=list(ALLOWED), ignore_patterns=["*/*"]))
    except Exception as error:  # the hub client raises its HTTP library's own errors too
        cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelUnavailableError(
            f"cannot fetch {repository!r} from the model hub: {cause}\n"
            "Check the name and the network (HF_TOKEN for a gated model), or name a local folder or .gguf file instead"
        ) from None


def locate(ref: str) -> ModelFiles | None:
    """The files of `ref` if it can be loaded now without network and without conversion, else None."""
    if model := BUILTIN.get(ref):
        folder = _prepared_folder(model)
        return ModelFiles(ref, folder, model.sha256) if is_prepared(folder, model.sha256) else None
    path = Path(ref).expanduser()
    if not path.exists():
        return _cached_snapshot(ref) if is_hub_id(ref) else None
    if (gguf := _only_gguf(path)) is None:
        return _checked_folder(ref, path)
    sha256 = file_sha256(gguf)
    folder = _converted_folder(gguf, sha256)
    return ModelFiles(ref, folder, sha256) if is_prepared(folder, sha256) else None


def _builtin(model: Builtin) -> ModelFiles:
    folder = _prepared_folder(model)
    files = ModelFiles(model.name, folder, model.sha256)
    if is_prepared(folder, model.sha256):
        return files
    with locked(folder.parent):
        if is_prepared(folder, model.sha256):
            return files  # another process was faster
        source = folder.parent / model.filename
        if not (source.is_file() and compute_sha256(source) == model.sha256):
            download(model, source)
        prepare(source, model.sha256, folder, inside=model.inside)
    return files


def _gguf(ref: str, gguf: Path) -> ModelFiles:
    sha256 = file_sha256(gguf)
    folder = _converted_folder(gguf, sha256)
    files = ModelFiles(ref, folder, sha256)
    if is_prepared(folder, sha256):
        return files
    with locked(folder.parent):
        if not is_prepared(folder, sha256):
            prepare(gguf, sha256, folder)
    return files


def _prepared_folder(model: Builtin) -> Path:
    return store_folder() / model.name / "prepared"


def _converted_folder(gguf: Path, sha256: str) -> Path:
    return store_folder() / "gguf" / f"{gguf.stem}-{sha256[:16]}" / "prepared"


def _only_gguf(path: Path) -> Path | None:
    """`path` if it is a GGUF file, or the GGUF file in a folder without safetensors; None for other folders."""
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelUnavailableError(f"{str(path)!r} is no .gguf file; name the folder of a Hugging Face model")
        return path
    found = sorted(path.glob("*.gguf"))
    if not found or any(path.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise ModelUnavailableError(f"{str(path)!r} holds {len(found)} .gguf files; name one of them")
    return found[0]


def _checked_folder(ref: str, folder: Path) -> ModelFiles:
    if not any(folder.glob("*.safetensors")):
        pickles = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
        reason = f": {pickles[0]} is a pickle, which runs code when it is read; convert it" if pickles else ""
        raise ModelUnavailableError(f"{str(folder)!r} holds no *.safetensors or .gguf weights{reason}")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelUnavailableError(
            f"{str(folder)!r} is an adapter: set model to the model it was made for, and adapter to this folder"
        )
    if not (folder / "config.json").is_file():
        raise ModelUnavailableError(f"{str(folder)!r} has no config.json; it is no Hugging Face model folder")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelUnavailableError(f"{str(folder)!r} has no tokenizer.json; save the model's tokenizer there")
    return ModelFiles(ref, folder, fingerprint(folder))


def _cached_snapshot(ref: str) -> ModelFiles | None:
    try:
        from huggingface_hub import snapshot_download

        return _checked_folder(ref, Path(snapshot_download(ref, local_files_only=True)))
    except (ImportError, OSError, ValueError, ModelUnavailableError):  # the hub's client has rules for names, too
        return None
