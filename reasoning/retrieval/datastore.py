"""A KNN-LM datastore on disk: one entry for each token of a corpus, with the hidden state before it and the token.

The folder holds `keys` (float16, [entries, width]), `values` (int32, [entries]) and `manifest.json`. The first two
only grow. The manifest records how many entries are valid and is replaced atomically: a killed build can be resumed.
The model reads every text of the corpus once (Khandelwal et al. 2020, section 2).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

FORMAT = 1
KEYS, VALUES, MANIFEST = "keys.f16", "values.i32", "manifest.json"
BATCH_TOKENS = 1024  # tokens in one forward: more are no faster on a CPU
WINDOW = 1024  # most tokens of context for a hidden state; longer texts are read in pieces

Keys = NDArray[np.float16]
Values = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DatastoreManifest:
    """The contents so far: `documents` documents of the corpus with hash `corpus`, read by the model `fingerprint`."""

    model: str
    fingerprint: str
    corpus: str
    width: int = 0
    documents: int = 0
    entries: int = 0
    complete: bool = False
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> DatastoreManifest | None:
        """The manifest in `folder`; None if there is none. Raises `ConfigurationError` if it cannot be read."""
        try:
            manifest = cls(**json.loads((folder / MANIFEST).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"{str(folder)!r} holds no datastore of this version: {error}") from error
        if manifest.format != FORMAT:
            raise ConfigurationError(f"{str(folder)!r} is a datastore of format {manifest.format}, not {FORMAT}")
        return manifest

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest atomically."""
        fresh = folder / f"{MANIFEST}.new"
        with fresh.open("w") as file:
            json.dump(asdict(self), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / MANIFEST)


def require_model(folder: Path, manifest: DatastoreManifest, fingerprint: str, model: str) -> None:
    """Raises `ConfigurationError` for a datastore whose keys are the states of another model."""
    if manifest.fingerprint != fingerprint:
        raise ConfigurationError(
            f"the datastore {str(folder)!r} was built with {manifest.model!r}, whose hidden states do not fit"
            f" {model!r}: build one with agentspec knn build --model {model}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Datastore:
    """A complete datastore, mapped into memory: `keys` [entries, width] and `values` [entries]."""

    manifest: DatastoreManifest
    keys: Keys
    values: Values

    @classmethod
    def open(cls, folder: Path, *, fingerprint: str, model: str) -> Datastore:
        """Raises `ConfigurationError` for a folder without a complete datastore of this model."""
        manifest = DatastoreManifest.read(folder)
        if manifest is None:
            raise ConfigurationError(f"{str(folder)!r} holds no datastore; build one with agentspec knn build")
        require_model(folder, manifest, fingerprint, model)
        if not manifest.complete:
            raise ConfigurationError(f"the datastore {str(folder)!r} is incomplete: run agentspec knn build again")
        try:
            keys = np.memmap(folder / KEYS, np.float16, "r", shape=(manifest.entries, manifest.width))
            values = np.memmap(folder / VALUES, np.int32, "r", shape=(manifest.entries,))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the datastore {str(folder)!r} is damaged: {error}") from error
        return cls(manifest, keys, values)


class DatastoreWriter(ExitStack):
    """Appends to the datastore in `folder`, after cutting off entries that its manifest does not count. Leaving it
    closes it.

    Raises `ConfigurationError` for a folder with a datastore of another model or corpus, and for a folder that another
    build is writing to.
    """

    def __init__(self, folder: Path, fresh: DatastoreManifest) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "writer.lock", timeout=0, thread_local=False)  # ends with this process at the latest
        try:
            self.enter_context(lock)
        except Timeout:
            raise ConfigurationError(f"another build is writing to {str(folder)!r}") from None
        self.folder, self.manifest = folder, _continued(folder, fresh)
        self._keys = self.enter_context((folder / KEYS).open("ab"))
        self._values = self.enter_context((folder / VALUES).open("ab"))
        self._keys.truncate(self.manifest.entries * self.manifest.width * np.dtype(np.float16).itemsize)
        self._values.truncate(self.manifest.entries * np.dtype(np.int32).itemsize)

    def append(self, keys: Sequence[NDArray[np.float32]], values: Sequence[Sequence[int]], documents: int) -> None:
        """Add the entries of `documents` more documents. Once this returns, the entries survive a crash."""
        for rows, tokens in zip(keys, values, strict=True):
            self._keys.write(rows.astype(np.float16).tobytes())
            self._values.write(np.asarray(tokens, np.int32).tobytes())
        for file in (self._keys, self._values):
            file.flush()
            os.fsync(file.fileno())
        width = next((rows.shape[1] for rows in keys), self.manifest.width)
        entries = self.manifest.entries + sum(map(len, values))
        documents += self.manifest.documents
        self.manifest = replace(self.manifest, width=width, documents=documents, entries=entries)
        self.manifest.write(self.folder)

    def finish(self) -> DatastoreManifest:
        """Mark the datastore as complete. Raises `ConfigurationError` for a corpus that gave no entries."""
        if not self.manifest.entries:
            raise ConfigurationError("the corpus has no text of two tokens or more")
        self.manifest = replace(self.manifest, complete=True)
        self.manifest.write(self.folder)
        return self.manifest


def _continued(folder: Path, fresh: DatastoreManifest) -> DatastoreManifest:
    """The manifest to continue from: the folder's if there is one, else `fresh`. Model and corpus must be the same."""
    found = DatastoreManifest.read(folder)
    if found is None:
        return fresh
    require_model(folder, found, fresh.fingerprint, fresh.model)
    if found.corpus != fresh.corpus:
        raise ConfigurationError(f"{str(folder)!r} holds a datastore of another corpus: name another folder")
    return found


def digest(texts: Sequence[str]) -> str:
    """A hash of a corpus: equal only if all its texts are."""
    hashed = hashlib.sha256()
    for text in texts:
        hashed.update(hashlib.sha256(text.encode()).digest())
    return hashed.hexdigest()


async def build(
    texts: Sequence[str], folder: Path, backend: TorchBackend, written: Callable[[int], None]
) -> DatastoreManifest:
    """Add the texts that `folder` lacks and finish its datastore. An interrupted build loses at most one batch.

    `written` receives how many more texts are safely on disk. Raises `ConfigurationError` for a folder with another
    datastore.
    """
    fresh = DatastoreManifest(backend.model_name, backend.fingerprint, digest(texts))
    with DatastoreWriter(folder, fresh) as writer:
        written(writer.manifest.documents)
        if writer.manifest.complete:
            return writer.manifest
        rest = islice(texts, writer.manifest.documents, None)
        for documents, pieces in _batches(rest, backend.encode):
            states = await backend.hidden_states([piece[:-1] for piece in pieces]) if pieces else []
            writer.append(states, [piece[1:] for piece in pieces], documents)
            written(documents)
        return writer.finish()


def _batches(texts: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[tuple[int, list[list[int]]]]:
    """Batches that fill a forward: the number of documents, and the token sequences that they were cut into."""
    documents, pieces = 0, list[list[int]]()
    for text in texts:
        documents += 1
        pieces += _windows(encode(text))
        if sum(map(len, pieces)) >= BATCH_TOKENS:
            yield documents, pieces
            documents, pieces = 0, []
    if documents:
        yield documents, pieces


def _windows(tokens: Sequence[int]) -> list[list[int]]:
    """Pieces of `WINDOW` states each; neighbouring pieces share a token. Pieces without a next token are left out."""
    pieces = (list(tokens[start : start + WINDOW + 1]) for start in range(0, len(tokens), WINDOW))
    return [piece for piece in pieces if len(piece) > 1]
