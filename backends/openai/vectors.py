"""Reads the vectors of an answer to /embeddings."""

from __future__ import annotations

import json
import math

from agentspec.protocol.json_scan import array_items, member_span


def vectors(answer: bytes, count: int) -> list[list[float]]:
    """The `count` vectors of an answer to /embeddings, all of one length. Each is parsed by itself: Python switches no
    threads inside one parse.

    Raises KeyError, TypeError, ValueError or RecursionError for what is no such answer.
    """
    start, end = member_span(answer, "data")
    if answer[start : start + 1] != b"[":
        raise TypeError("data is no array")
    found = [[float(number) for number in json.loads(item)["embedding"]] for item in array_items(answer, start, end)]
    if len(found) != count or len({len(vector) for vector in found}) > 1 or not all(found):
        raise ValueError("there are other vectors than were asked for")
    if not all(math.isfinite(sum(vector)) for vector in found):
        raise ValueError("a vector holds what is no number")
    return found
