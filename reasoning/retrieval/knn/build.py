"""Builds a KNN-LM datastore (Khandelwal et al. 2020, section 2): the model reads every text of a corpus once."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

from agentspec.errors import ConfigurationError
from agentspec.protocol.validation import is_text
from agentspec.reasoning.retrieval.knn.datastore import DatastoreManifest, DatastoreWriter

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

BATCH_TOKENS = 1024  # tokens in one forward: more are no faster on a CPU
WINDOW = 1024  # most tokens of context for a hidden state; longer texts are read in pieces

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a build: documents and entries that are safely on disk, of `total` documents."""

    documents: int
    entries: int
    total: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files of JSON lines with `text` and perhaps `title`, which begins the text; `.gz` files are decompressed."""

    files: tuple[Path, ...]

    def digest(self) -> str:
        """A hash of the contents of all files."""
        hashed = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as stream:
                hashed.update(hashlib.file_digest(stream, "sha256").digest())
        return hashed.hexdigest()

    def count(self) -> int:
        return sum(1 for _ in self._lines())

    def texts(self) -> Iterator[str]:
        """The documents' texts in order. Raises `ConfigurationError` that names a line which is no document."""
        for file, number, line in self._lines():
            try:
                record = json.loads(line)
                text, title = record["text"], record.get("title") or ""
                if not all(isinstance(one, str) and is_text(one) for one in (text, title)):
                    raise ValueError("text and title must be texts")
                yield f"{title}\n{text}" if title else text
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                wanted = '{"text": "..."} or {"id": "...", "title": "...", "text": "..."}'
                raise ConfigurationError(f"{file}, line {number}: not a document, {wanted}: {error!r}") from error

    def _lines(self) -> Iterator[tuple[Path, int, str]]:
        for file in self.files:
            try:
                with open_lines(file) as lines:
                    yield from ((file, number, line) for number, line in enumerate(lines, 1) if line.strip())
            except (OSError, EOFError, UnicodeError, zlib.error) as error:
                raise ConfigurationError(f"{file} cannot be read: {error}") from error


async def build(
    corpus: Corpus,
    folder: Path,
    backend: TorchBackend,
    model: str,
    encode: Encode,
    progress: Callable[[Progress], None],
) -> DatastoreManifest:
    """Add the documents that `folder` lacks and finish its datastore. An interrupted build loses at most one batch.

    Raises `ConfigurationError` for a folder with another datastore, a file that cannot be read and a line that is no
    document.
    """
    fresh = DatastoreManifest(model, backend.fingerprint, corpus.digest())
    total = corpus.count()
    with DatastoreWriter(folder, fresh) as writer:
        progress(Progress(writer.manifest.documents, writer.manifest.entries, total))
        if writer.manifest.complete:
            return writer.manifest
        rest = islice(corpus.texts(), writer.manifest.documents, None)
        for documents, pieces in _batches(rest, encode):
            states = await backend.hidden_states([piece[:-1] for piece in pieces]) if pieces else []
            writer.append(states, [piece[1:] for piece in pieces], documents)
            progress(Progress(writer.manifest.documents, writer.manifest.entries, total))
        return writer.finish()


def _batches(texts: Iterator[str], encode: Encode) -> Iterator[tuple[int, list[list[int]]]]:
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


def open_lines(file: Path) -> IO[str]:
    """Open a text file for reading, and decompress it if its name ends in `.gz`."""
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")
