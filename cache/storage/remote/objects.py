"""Where published segments lie: a folder, or an object store by fsspec. Objects appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from agentspec.errors import ConfigurationError, install_advice

PART = ".new"


class SegmentObjects(Protocol):
    """Objects by name, with `/` between a directory and the rest. All methods may raise `OSError`."""

    def names(self) -> list[str]:
        """All objects, and parts of some that were left behind, whose names have `PART` at the end."""
        ...

    def read(self, name: str, size: int | None = None) -> bytes:
        """An object, or its first `size` bytes."""
        ...

    def fetch(self, name: str, path: Path, size: int = 0) -> None:
        """Copy an object, which should be of `size` bytes, to a file."""
        ...

    def send(self, path: Path, name: str) -> None:
        """Copy a file to an object, which others see once it is whole, in place of the one with that name."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object; no error if there is none."""
        ...


def open_objects(remote: str) -> SegmentObjects:
    """The objects in a folder, or at a URL that fsspec knows. Raises `ConfigurationError` for one that it does not."""
    if "://" not in remote or remote.startswith("file://"):
        return FolderObjects(Path(remote.removeprefix("file://")).expanduser())
    shown = re.sub(r"://[^/]*@", "://***@", remote)  # a URL may hold a password
    named = f"cache.remote = {shown!r}"
    try:
        from fsspec.core import url_to_fs

        return StoreObjects(*url_to_fs(remote))
    except ImportError as error:
        message = f"{named} needs what fsspec asks for ({error}); {install_advice('remote')}"
        raise ConfigurationError(message, param="remote") from None
    except Exception as error:  # whatever a file system's own package raises
        reason = str(error).replace(remote, shown)
        raise ConfigurationError(f"{named} cannot be used: {reason}", param="remote") from None


class FolderObjects:
    """Objects as files of a folder, readable by their owner only.

    What is being written, or was left half written, is listed too: it may hold what is to be deleted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        files = self._folder.rglob("*")
        return [path.relative_to(self._folder).as_posix() for path in files if path.is_file()]

    def read(self, name: str, size: int | None = None) -> bytes:
        with (self._folder / name).open("rb") as file:
            return file.read(-1 if size is None else size)

    def fetch(self, name: str, path: Path, size: int = 0) -> None:
        shutil.copyfile(self._folder / name, path)

    def send(self, path: Path, name: str) -> None:
        target = self._folder / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = target.with_name(f"{target.name}.{secrets.token_hex(4)}{PART}")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


class StoreObjects:
    """Objects of an fsspec file system below `root`. Its errors of any kind are raised as `OSError`."""

    def __init__(self, files: Any, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")

    def names(self) -> list[str]:
        with _as_os_error():
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._root)
            except FileNotFoundError:
                return []
        return [name.removeprefix(self._root).lstrip("/") for name in found]

    def read(self, name: str, size: int | None = None) -> bytes:
        with _as_os_error():
            return bytes(self._files.cat_file(self._path(name), end=size))

    def fetch(self, name: str, path: Path, size: int = 0) -> None:
        with _as_os_error():
            self._files.get_file(self._path(name), str(path))

    def send(self, path: Path, name: str) -> None:
        with contextlib.suppress(Exception):  # an object store has no directories; where there are, the next call tells
            self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
        with _as_os_error():
            self._files.put_file(str(path), self._path(name))

    def delete(self, name: str) -> None:
        with _as_os_error(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of the packages behind fsspec, each with errors of its own
        raise OSError(f"{type(error).__name__}: {error}") from error
