"""Consistent hashing: names on a circle, so that a member that comes or goes moves only its own share of the keys.

Karger et al. 1997. Whoever walks on past members without room keeps loads bounded and moves few keys still: Mirrokni,
Thorup and Zadimoghaddam 2016, "Consistent Hashing with Bounded Loads".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from hashlib import blake2b

POINTS = 128  # on the circle for a weight of 1: the shares of equal members then differ by about a tenth
_KEY = b"agentspec placement ring"  # a hash of its own, the same in every process and on every machine


class HashRing:
    """Members by name and weight. The order in which they came does not matter."""

    def __init__(self, members: Mapping[str, float] | None = None) -> None:
        self._weights: dict[str, float] = {}
        self._points: list[tuple[int, str]] = []
        self.add(members or {})

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, members: Mapping[str, float]) -> None:
        """Add members, or give those that are there another weight. Costs a sort if there is anything to do."""
        changed = {name: weight for name, weight in members.items() if self._weights.get(name) != weight}
        if not changed:
            return
        self._points = [point for point in self._points if point[1] not in changed]
        self._points += [(point, name) for name, weight in changed.items() for point in _points(name, weight)]
        self._points.sort()
        self._weights |= changed

    def remove(self, name: str) -> None:
        """Take the member off the ring; its keys go to those that follow it. Unknown names are fine."""
        if self._weights.pop(name, None) is not None:
            self._points = [point for point in self._points if point[1] != name]

    def walk(self, key: str) -> Iterator[str]:
        """All members, each once, in the order in which `key` asks them: the first one is its home."""
        points = self._points
        start = bisect_left(points, (_hash(key.encode(errors="surrogatepass")), ""))
        seen: set[str] = set()
        for step in range(len(points)):
            name = points[(start + step) % len(points)][1]
            if name not in seen:
                seen.add(name)
                yield name


def _points(name: str, weight: float) -> Iterator[int]:
    for number in range(max(1, round(POINTS * weight))):
        yield _hash(f"{number}:{name}".encode())


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8, key=_KEY).digest())
