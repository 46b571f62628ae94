"""A KNN-LM datastore on disk: one entry for each token of a corpus, with the hidden state before it and the token.

The folder holds `keys` (float16, [entries, width]), `values` (int32, [entries]) and `manifest.json`. The model reads
every text of the corpus once (Khandelwal et al. 2020, section 2).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.folder import replacing

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

FORMAT = 1
FILES = {KEYS := "keys.f16", VALUES := "values.i32", MANIFEST := "manifest.json"}
BATCH_TOKENS = 1024  # tokens in one forward: more are no faster on a CPU
WINDOW = 1024  # most tokens of context for a hidden state; longer texts are read in pieces

Keys = NDArray[np.float16]
Values = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DatastoreManifest:
    """The contents: `entries` entries of `documents` documents, read by the model `fingerprint`."""

    model: str
    fingerprint: str
    width: int
    documents: int
    entries: int
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> DatastoreManifest:
        """The manifest in `folder`. Raises `ConfigurationError` if there is none, or it cannot be read."""
        try:
            manifest = cls(**json.loads((folder / MANIFEST).read_text()))
        except FileNotFoundError:
            raise ConfigurationError(
                f"{str(folder)!r} holds no datastore; build one with agentspec knn build"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"{str(folder)!r} holds no datastore of this version: {error}") from error
        if manifest.format != FORMAT:
            raise ConfigurationError(f"{str(folder)!r} is a datastore of format {manifest.format}, not {FORMAT}")
        return manifest


@dataclass(frozen=True, slots=True, eq=False)
class Datastore:
    """A datastore, mapped into memory: `keys` [entries, width] and `values` [entries]."""

    manifest: DatastoreManifest
    keys: Keys
    values: Values

    @classmethod
    def open(cls, folder: Path, *, fingerprint: str, model: str) -> Datastore:
        """Raises `ConfigurationError` for a folder without a datastore of this model."""
        manifest = DatastoreManifest.read(folder)
        if manifest.fingerprint != fingerprint:
            raise ConfigurationError(
                f"the datastore {str(folder)!r} was built with {manifest.model!r}, whose hidden states do not fit"
                f" {model!r}: build one with agentspec knn build --model {model}"
            )
        try:
            keys = np.memmap(folder / KEYS, np.float16, "r", shape=(manifest.entries, manifest.width))
            values = np.memmap(folder / VALUES, np.int32, "r", shape=(manifest.entries,))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the datastore {str(folder)!r} is damaged: {error}") from error
        return cls(manifest, keys, values)


async def build(
    texts: Sequence[str], folder: Path, backend: TorchBackend, written: Callable[[int], None]
) -> DatastoreManifest:
    """Build a datastore of the texts in `folder`, atomically; it replaces an existing one. `written` receives how many
    more texts are done.

    Raises `ConfigurationError` for a corpus that gives no entries, and a folder that holds something else.
    """
    entries = width = 0
    with replacing(folder, FILES) as fresh, (fresh / KEYS).open("wb") as keys, (fresh / VALUES).open("wb") as values:
        for documents, pieces in _batches(texts, backend.encode):
            found = await backend.hidden_states([piece[:-1] for piece in pieces]) if pieces else []
            for states, piece in zip(found, pieces, strict=True):
                keys.write(states.astype(np.float16).tobytes())
                values.write(np.asarray(piece[1:], np.int32).tobytes())
                width, entries = states.shape[1], entries + len(states)
            written(documents)
        if not entries:
            raise ConfigurationError("the corpus has no text of two tokens or more")
        manifest = DatastoreManifest(backend.model_name, backend.fingerprint, width, len(texts), entries)
        (fresh / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2))
    return manifest


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
