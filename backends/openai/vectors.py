"""Reads the vectors of an answer to /embeddings."""

from __future__ import annotations

import json

from agentspec.protocol.json_scan import array_items, member_span


def vectors(answer: bytes) -> list[list[float]]:
    """The vectors of an answer to /embeddings, each parsed by itself: Python switches no threads inside one parse.

    Raises KeyError, TypeError, ValueError or RecursionError for what is no such answer.
    """
    start, end = member_span(answer, "data")
    if answer[start : start + 1] != b"[":
        raise TypeError("data is no array")
    return [[float(number) for number in json.loads(item)["embedding"]] for item in array_items(answer, start, end)]
