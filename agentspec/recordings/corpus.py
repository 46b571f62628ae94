"""Reads a corpus of JSON lines: one document per line, `{"id", "text"}` with optional `"title"` and `"metadata"`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.recordings.calls import BadLineError, OnBad, json_object, lines, refuse


def read_corpus(path: Path, on_bad: OnBad = refuse) -> Iterator[Document]:
    """The documents of a file, which may be compressed with gzip. A line that repeats an id is a bad line.

    Raises `ConfigurationError` if the file cannot be read, and what `on_bad` raises.
    """
    seen: dict[str, str] = {}
    for place, line in lines(path):
        try:
            document = _document(line, place)
            if document.id in seen:
                raise BadLineError(place, f"the id {document.id!r} was given in {seen[document.id]} already")
            seen[document.id] = place
            yield document
        except BadLineError as error:
            on_bad(error)


def read_texts(path: Path) -> Iterator[str]:
    """The titles and texts of a file's documents, which need no ids. Raises `ConfigurationError` for a bad line."""
    for place, line in lines(path):
        fields = _fields(line, place)
        title, text = _member(fields, "title", place), _member(fields, "text", place)
        yield f"{title}\n{text}" if title else text


def _document(line: bytes, place: str) -> Document:
    fields = _fields(line, place)
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict):
        raise BadLineError(place, '"metadata" must be an object')
    return Document(_id(fields, place), _member(fields, "text", place), _member(fields, "title", place), metadata)


def _fields(line: bytes, place: str) -> dict[str, Any]:
    fields = json_object(line, place)
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # the index could not be written, after all its work
        raise BadLineError(place, f"holds a lone surrogate, {error.object[error.start]!r}, which is not text") from None
    return fields


def _id(fields: dict[str, Any], place: str) -> str:
    """The document's id as a string; a whole number becomes its digits."""
    value = fields.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadLineError(place, '"id" must be a text that is not empty, or a whole number')
    return str(value)


def _member(fields: dict[str, Any], name: str, place: str) -> str:
    value = fields.get(name)
    if value is None and name == "title":
        return ""
    if not isinstance(value, str) or (name == "text" and not value.strip()):
        raise BadLineError(place, f'"{name}" must be a text{" that is not empty" if name == "text" else ""}')
    return value
