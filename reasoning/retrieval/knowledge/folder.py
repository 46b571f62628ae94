"""A knowledge base on disk: documents, an index, and a manifest whose hash is the knowledge base's version."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from agentspec.backends.model_store.store import compute_sha256, file_sha256
from agentspec.errors import ConfigurationError, KnowledgeBaseError
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.reasoning.retrieval.knowledge.bm25 import Bm25Index
from agentspec.reasoning.retrieval.knowledge.dense import DenseIndex, Encoder
from agentspec.reasoning.retrieval.knowledge.memory import Index, IndexKnowledge, Snapshot

Kind = Literal["dense", "hnsw", "bm25"]
Advance = Callable[[str, int], None]
EncoderOf = Callable[[str], Encoder]

FORMAT = 1
_MANIFEST, _DOCUMENTS = "manifest.json", "documents.jsonl"


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
    """Build an index of `documents` in `folder`, atomically; it replaces an existing index.

    A dense index is opened later with the embedding model named `model`. `advance` reports progress: the kind of work,
    and how many more items are done. Raises `ConfigurationError` for an empty corpus, duplicate ids, and a folder that
    holds something else than an index.
    """
    with _replacing(folder) as fresh:
        index = index_of(documents, kind, encoder, advance)
        index.save(fresh)
        with (fresh / _DOCUMENTS).open("w", encoding="utf-8") as file:
            file.writelines(_line(document) for document in index.documents)
        hashes = {path.name: compute_sha256(path) for path in sorted(fresh.iterdir())}
        fingerprint = encoder.fingerprint if encoder is not None and kind != "bm25" else None
        manifest = IndexManifest(kind, len(documents), hashes, model if fingerprint else None, fingerprint)
        (fresh / _MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
    return manifest


def in_memory(
    documents: Sequence[Document], kind: Kind, encoder: Encoder | None = None, *, version: str = "memory"
) -> IndexKnowledge:
    """A knowledge base in memory only. Raises `ConfigurationError` as `build` does."""
    return IndexKnowledge(Snapshot(index_of(documents, kind, encoder), version))


def index_of(
    documents: Sequence[Document],
    kind: Kind,
    encoder: Encoder | None = None,
    advance: Advance = lambda what, done: None,
) -> Bm25Index | DenseIndex:
    """Index titles and texts. Raises `ConfigurationError` as `build` does."""
    ordered = _ordered(documents)
    if kind == "bm25":
        return Bm25Index.build(ordered)
    if encoder is None:
        raise ConfigurationError(f"an index of kind {kind} needs an embedding model", param="model")
    texts = [f"{document.title}\n{document.text}" if document.title else document.text for document in ordered]
    vectors = encoder.encode_all(texts, lambda done: advance("encoding", done))
    return DenseIndex.build(ordered, vectors, encoder, kind, advance=lambda done: advance("indexing", done))


def open_folder(folder: Path, encoder_of: EncoderOf, *, model: str | None = None, threads: int = 1) -> IndexKnowledge:
    """Open the knowledge base in `folder`, which may be rebuilt while it is open.

    `encoder_of` loads the embedding model that `model`, or else the manifest, names. Raises `KnowledgeBaseError` for a
    folder without an index or with a damaged one, `ConfigurationError` if another model built the index, and for
    `model` or `threads` of one that searches by words.
    """
    opened = _Opened(folder, encoder_of, model, threads)
    return IndexKnowledge(opened.read(), opened.read, opened.close)


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


class _Opened:
    """An open folder, which is read again after its manifest was replaced."""

    def __init__(self, folder: Path, encoder_of: EncoderOf, model: str | None, threads: int) -> None:
        self._folder, self._encoder_of, self._model, self._threads = folder, encoder_of, model, threads
        self._encoder: Encoder | None = None
        self._kind: Kind | None = None
        self._seen: tuple[int, int] | None = None

    def read(self, current: Snapshot | None = None) -> Snapshot:
        """Read the folder. Returns `current` if the folder is unchanged, or missing because it is being replaced.

        If the folder is replaced during reading, it is read again.
        """
        while True:
            seen = _stamp(self._folder)
            if current is not None and seen in (None, self._seen):
                return current
            try:
                snapshot = self._read()
            except KnowledgeBaseError:
                if _stamp(self._folder) == seen:
                    raise
                continue
            if _stamp(self._folder) == seen:
                self._seen = seen
                return snapshot

    def _read(self) -> Snapshot:
        manifest = read_manifest(self._folder)
        if self._kind not in (None, manifest.kind):
            message = f"{self._folder} was rebuilt as {manifest.kind}, which ranks differently from {self._kind}"
            raise KnowledgeBaseError(f"{message}: open it again")
        index = self._loaded(manifest)
        self._kind = manifest.kind
        return Snapshot(index, manifest.version)

    def close(self) -> None:
        if self._encoder is not None:
            self._encoder.close()

    def _loaded(self, manifest: IndexManifest) -> Index:
        try:
            for name, known in manifest.files.items():
                if file_sha256(self._folder / name) != known:
                    raise KnowledgeBaseError(f"{self._folder / name} is not what was built: build it again")
            documents = list(_read_documents(self._folder / _DOCUMENTS))
            if manifest.kind == "bm25":
                self._refuse_options_of_vectors()
                return Bm25Index.load(self._folder, documents)
            return DenseIndex.load(self._folder, documents, self._encoder_for(manifest), threads=self._threads)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise KnowledgeBaseError(f"{self._folder} cannot be read: {error}; build it again") from error

    def _refuse_options_of_vectors(self) -> None:
        for name, given in (("model", self._model is not None), ("threads", self._threads != 1)):
            if given:
                message = f"{self._folder} is of kind bm25, whose search knows no {name}: leave it out"
                raise ConfigurationError(message, param=name)

    def _encoder_for(self, manifest: IndexManifest) -> Encoder:
        if self._encoder is None:
            self._encoder = self._encoder_of(self._model or manifest.model or "")
        if self._encoder.fingerprint != manifest.encoder:
            raise ConfigurationError(
                f"{self._folder} was built with another embedding model than {self._model or manifest.model!r}:"
                " name that one, or build it again",
                param="model",
            )
        return self._encoder


def _ordered(documents: Sequence[Document]) -> list[Document]:
    if not documents:
        raise ConfigurationError("the corpus holds no documents")
    ordered = sorted(documents, key=lambda document: document.id)
    for one, other in pairwise(ordered):
        if one.id == other.id:
            raise ConfigurationError(f"the corpus holds two documents with the id {one.id!r}")
    return ordered


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder that becomes `folder` when the block ends without an error."""
    folder = folder.absolute()
    if folder.exists() and not (folder / _MANIFEST).is_file():
        raise ConfigurationError(f"{folder} exists and is no knowledge base: name another folder", param="out")
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


def _stamp(folder: Path) -> tuple[int, int] | None:
    """A stamp that changes when the manifest is replaced; None without a manifest."""
    try:
        stat = (folder / _MANIFEST).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _line(document: Document) -> str:
    fields = {"id": document.id, "title": document.title, "text": document.text}
    more = {"metadata": dict(document.metadata)} if document.metadata else {}
    return json.dumps(fields | more, ensure_ascii=False) + "\n"


def _read_documents(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield Document(**json.loads(line))
