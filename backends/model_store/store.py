"""The folder of fetched and converted models, the hashes of files, and child programs that work on them."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agentspec.errors import ModelUnavailableError

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


def announce(what: str, *, show: bool) -> None:
    """Say what begins: in the log, and with `show` on a terminal."""
    logging.getLogger("agentspec.models").info("%s", what)
    if show and sys.stderr.isatty():
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


def file_sha256(path: Path, *, fresh: bool = False) -> str:
    """The file's SHA-256 in hexadecimal, cached by path, size and modification time; `fresh` computes it anew."""
    stat = path.stat()
    identity = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    note = store_folder() / "hashes" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    if not fresh:
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
