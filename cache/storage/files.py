"""The file operations that segments need, as one small layer: tests put a failing one in its place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Protocol


class Files(Protocol):
    """The files of one folder, by name. Every method may raise `OSError`."""

    def names(self) -> list[str]: ...

    def size(self, name: str) -> int: ...

    def open(self, name: str) -> BinaryIO:
        """For reading."""
        ...

    def create(self, name: str) -> BinaryIO:
        """For writing, emptied if it is there. Readable by its owner only."""
        ...

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None: ...

    def sync(self, file: BinaryIO) -> None:
        """Return when what was written is on disk."""
        ...

    def rename(self, old: str, new: str) -> None:
        """In one step, in the place of what has the new name, and on disk."""
        ...

    def unlink(self, name: str) -> None:
        """No error where it is gone already."""
        ...


class Folder:
    """The operating system's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        return os.listdir(self._path)

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def open(self, name: str) -> BinaryIO:
        return (self._path / name).open("rb", buffering=0)

    def create(self, name: str) -> BinaryIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.fdopen(os.open(self._path / name, flags, 0o600), "wb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        os.replace(self._path / old, self._path / new)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def unlink(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class NoFiles:
    """Of no folder: there are no files, and nothing asks for one."""

    def names(self) -> list[str]:
        return []

    def size(self, name: str) -> int:
        raise FileNotFoundError(name)

    def open(self, name: str) -> BinaryIO:
        raise FileNotFoundError(name)

    def create(self, name: str) -> BinaryIO:
        raise FileNotFoundError(name)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        raise FileNotFoundError

    def sync(self, file: BinaryIO) -> None:
        raise FileNotFoundError

    def rename(self, old: str, new: str) -> None:
        raise FileNotFoundError(old)

    def unlink(self, name: str) -> None:
        raise FileNotFoundError(name)
