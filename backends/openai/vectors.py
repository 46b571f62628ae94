"""Reads the vectors of an answer to /embeddings."""

from __future__ import annotations

import json
import math


def vectors(answer: bytes, count: int) -> list[list[float]]:
    """The `count` vectors of an answer to /embeddings, all of one length.

    Raises KeyError, TypeError, ValueError or RecursionError for what is no such answer.
    """
    data = json.loads(answer)["data"]
    if not isinstance(data, list):
        raise TypeError("data is no array")
    found = [[float(number) for number in item["embedding"]] for item in data]
    if len(found) != count or len({len(vector) for vector in found}) > 1 or not all(found):
        raise ValueError("there are other vectors than were asked for")
    if not all(math.isfinite(sum(vector)) for vector in found):
        raise ValueError("a vector holds what is no number")
    return found
