"""A knowledge base on disk: documents, an index, and a manifest whose hash is the knowledge base's version.

Its documents and vectors are mapped and not loaded; searches run in threads and do not block the event loop.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, SupportsIndex

import anyio
import numpy as np

from agentspec.backends.model_store import compute_sha256, file_sha256
from agentspec.errors import ConfigurationError, KnowledgeBaseError
from agentspec.reasoning.retrieval.knowledge.base import (
    Document,
    KnowledgeBase,
    Metric,
    Query,
    SearchResult,
)
from agentspec.reasoning.retrieval.knowledge.bm25 import VOCABULARY, WEIGHTS, Bm25Index
from agentspec.reasoning.retrieval.knowledge.dense import FILE, DenseIndex, Encoder
from agentspec.reasoning.settings import IndexSettings, RemoteSettings

Kind = Literal["dense", "hnsw", "bm25"]
Index = Bm25Index | DenseIndex
Advance = Callable[[str, int], None]

FORMAT = 1
_CHUNK = 1 << 24  # bytes
_MANIFEST, _DOCUMENTS = "manifest.json", "documents.jsonl"
FILES = {_MANIFEST, _DOCUMENTS, FILE, WEIGHTS, VOCABULARY}  # of all kinds


@dataclass(frozen=True, slots=True)
class IndexManifest:
    """The contents of a folder. `files` maps names to SHA-256s. Dense: also `model` and its fingerprint `encoder`."""

    kind: Kind
    documents: int
    files: dict[str, str]
    model: str | None = None
    encoder: str | None = None
    format: int = FORMAT

    @property
    def version(self) -> str:
        """A hash of the manifest: equal exactly if the contents are equal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def build(
    documents: Sequence[Document],
    folder: Path,
    kind: Kind,
    *,
    encoder: Encoder | None = None,
    model: str | None = None,
    advance: Advance = lambda what, done: None,
) -> IndexManifest:
    """Build an index of `documents` in `folder`, atomically; it replaces an existing index. A dense one is opened with
    the embedding model named `model`. `advance` receives the kind of work, and how many more items are done.

    Raises `ConfigurationError` for an empty corpus, duplicate ids, and a folder that holds something else.
    """
    with replacing(folder, FILES) as fresh:
        index = index_of(documents, kind, encoder, advance)
        index.save(fresh)
        with (fresh / _DOCUMENTS).open("w", encoding="utf-8") as file:
            file.writelines(_line(document) for document in index.documents)
        hashes = {path.name: compute_sha256(path) for path in sorted(fresh.iterdir())}
        fingerprint = encoder.fingerprint if encoder is not None and kind != "bm25" else None
        manifest = IndexManifest(kind, len(documents), hashes, model if fingerprint else None, fingerprint)
        (fresh / _MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
    return manifest


class StoredDocuments(Sequence[Document]):
    """The documents of a file of lines, which is mapped: each is read when a search finds it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            pieces = iter(lambda: file.read(_CHUNK), b"")
            ends = [
                np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + at * _CHUNK
                for at, piece in enumerate(pieces)
            ]
        self._ends = np.concatenate(ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: SupportsIndex) -> Document:  # type: ignore[override]  # no search asks for a slice
        begin = self._ends[int(row) - 1] + 1 if int(row) else 0
        return Document(**json.loads(self._bytes[begin : self._ends[int(row)]]))


class IndexKnowledge:
    """A `KnowledgeBase` over an index in memory, of one `version`. `aclose` closes the encoder that it owns."""

    def __init__(self, index: Index, version: str = "memory", owned: Encoder | None = None) -> None:
        self.index, self.version = index, version
        self._owned = owned

    @property
    def metric(self) -> Metric:
        return self.index.metric

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        found = await anyio.to_thread.run_sync(self.index.search, queries, count, abandon_on_cancel=True)
        return SearchResult(self.version, tuple(found))

    async def aclose(self) -> None:
        owned, self._owned = self._owned, None
        if owned is not None:
            await anyio.to_thread.run_sync(owned.close)


def in_memory(documents: Sequence[Document], kind: Kind, encoder: Encoder | None = None) -> IndexKnowledge:
    """A knowledge base in memory only. Raises `ConfigurationError` as `build` does."""
    return IndexKnowledge(index_of(documents, kind, encoder))


def index_of(
    documents: Sequence[Document],
    kind: Kind,
    encoder: Encoder | None = None,
    advance: Advance = lambda what, done: None,
) -> Index:
    """Index titles and texts. Raises `ConfigurationError` as `build` does."""
    ordered = _ordered(documents)
    if kind == "bm25":
        return Bm25Index.build(ordered)
    if encoder is None:
        raise ConfigurationError(f"an index of kind {kind} needs an embedding model", param="model")
    texts = [f"{document.title}\n{document.text}" if document.title else document.text for document in ordered]
    vectors = encoder.encode_all(texts, lambda done: advance("encoding", done))
    return DenseIndex.build(ordered, vectors, encoder, kind, advance=lambda done: advance("indexing", done))


def open_knowledge(settings: IndexSettings | RemoteSettings, name: str | None = None) -> KnowledgeBase:
    """Open the knowledge base of a `[knowledge.NAME]` table. Blocks while it reads a folder; asks a service nothing.

    Errors of a service call it `name`, or by its address. Raises as `open_folder` does, and `ModelUnavailableError`.
    """
    if isinstance(settings, IndexSettings):
        return open_folder(settings.path, load_encoder)
    from agentspec.reasoning.retrieval.knowledge.remote import RemoteKnowledge

    return RemoteKnowledge(settings, name=name)


def load_encoder(model: str) -> Encoder:
    """Load the embedding model of a built-in name, a folder or a model-hub id. Raises `ModelUnavailableError`."""
    from agentspec.backends.torch.embeddings import SentenceEncoder

    return SentenceEncoder.load(model)


def open_folder(folder: Path, encoder_of: Callable[[str], Encoder]) -> IndexKnowledge:
    """Open the knowledge base in `folder`, with the embedding model that its manifest names.

    Raises `KnowledgeBaseError` for a folder without an index or with a damaged one, `ConfigurationError` if the name
    now is that of another model.
    """
    manifest = read_manifest(folder)
    encoder = None if manifest.kind == "bm25" else encoder_of(manifest.model or "")
    if encoder is not None and encoder.fingerprint != manifest.encoder:
        raise ConfigurationError(f"{manifest.model!r} is not the model that {folder} was built with: build it again")
    try:
        for name, known in manifest.files.items():
            if file_sha256(folder / name) != known:
                raise KnowledgeBaseError(f"{folder / name} is not what was built: build it again")
        documents = StoredDocuments(folder / _DOCUMENTS)
        index = Bm25Index.load(folder, documents) if encoder is None else DenseIndex.load(folder, documents, encoder)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise KnowledgeBaseError(f"{folder} cannot be read: {error}; build it again") from error
    return IndexKnowledge(index, manifest.version, encoder)


def read_manifest(folder: Path) -> IndexManifest:
    """Raises `KnowledgeBaseError` if `folder` has no manifest of this format."""
    try:
        values = json.loads((folder / _MANIFEST).read_text())
        if values["format"] != FORMAT:
            raise KnowledgeBaseError(f"{folder} is of format {values['format']}, not {FORMAT}: build it again")
        return IndexManifest(**values)
    except OSError as error:
        message = f"{folder} is no knowledge base ({error.strerror}); agentspec kb build makes one"
        raise KnowledgeBaseError(message) from None
    except (ValueError, KeyError, TypeError) as error:
        raise KnowledgeBaseError(f"{folder / _MANIFEST} cannot be read: {error}; build it again") from None


def _ordered(documents: Sequence[Document]) -> list[Document]:
    if not documents:
        raise ConfigurationError("the corpus holds no documents")
    ordered = sorted(documents, key=lambda document: document.id)
    for one, other in pairwise(ordered):
        if one.id == other.id:
            raise ConfigurationError(f"the corpus holds two documents with the id {one.id!r}")
    return ordered


def require_replaceable(folder: Path, files: Set[str]) -> None:
    """Raise `ConfigurationError` for a folder that holds something else than a manifest and more of `files`."""
    if folder.exists() and not {_MANIFEST} < {path.name for path in folder.glob("*")} <= files:
        raise ConfigurationError(
            f"{folder} exists and is no index or datastore to replace, or holds more: name another folder", param="out"
        )


@contextmanager
def replacing(folder: Path, files: Set[str]) -> Iterator[Path]:
    """A new folder, with some of `files`, that becomes `folder` when the block ends without an error."""
    folder = folder.absolute()
    require_replaceable(folder, files)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigurationError(f"cannot write to {folder.parent}: {error.strerror}", param="out") from None
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        yield fresh
        if folder.exists():
            folder.rename(scratch / "old")
        fresh.rename(folder)
    finally:
        if not folder.exists() and (scratch / "old").exists():  # stopped between the two
            (scratch / "old").rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)


def _line(document: Document) -> str:
    fields = {"id": document.id, "title": document.title, "text": document.text}
    more = {"metadata": dict(document.metadata)} if document.metadata else {}
    return json.dumps(fields | more, ensure_ascii=False) + "\n"
