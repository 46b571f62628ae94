"""The cases of the matrix: what a request can be made of, and a covering array over it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations, product
from typing import Any

AXES: dict[str, tuple[Any, ...]] = {
    "api": ("chat", "completions", "responses", "messages"),
    "backend": ("engine", "scripted", "upstream", "native", "pool", "strategy", "retrieval"),
    "content": ("plain", "tools", "structured", "thoughts", "image"),
    "ending": ("complete", "length", "disconnect", "cut", "error", "deadline"),
    "stream": (False, True),
    "keyed": (False, True),
    "store": (True, False),
    "speculation": (True, False),
    "labels": (False, True),
}
FORWARDED = ("upstream", "native", "pool")
STRATEGIES = ("strategy", "retrieval")


@dataclass(frozen=True)
class Case:
    """One request. `keyed`: the gateway has two tenants with keys. `native`: the upstream answers each API itself."""

    api: str
    backend: str
    content: str
    ending: str
    stream: bool
    keyed: bool
    store: bool
    speculation: bool
    labels: bool

    def __str__(self) -> str:
        flags = [name for name in ("stream", "keyed", "labels") if getattr(self, name)]
        flags += [f"no-{name}" for name in ("store", "speculation") if not getattr(self, name)]
        return "-".join([self.api, self.backend, self.content, self.ending, *flags])

    @property
    def whole(self) -> bool:
        """Whether the answer arrives complete."""
        return self.ending in ("complete", "length")

    @property
    def own_key(self) -> bool:
        """Whether the upstream gets the operator's key."""
        return self.backend in ("upstream", "pool")

    @property
    def refused(self) -> bool:
        """Whether the gateway answers 400: the model cannot do what is asked."""
        unseen = self.content == "image" and self.backend not in FORWARDED
        return unseen or (self.api == "completions" and self.backend == "strategy")


def possible(case: dict[str, Any]) -> bool:
    """Whether the values of a case, or of a part of one, can meet. What the gateway refuses is possible, too."""
    api, backend, content, ending = (case.get(name) for name in ("api", "backend", "content", "ending"))
    if api == "completions" and content not in (None, "plain"):
        return False  # the API has prompts alone
    if backend == "native" and content not in (None, "plain"):
        return False  # bytes pass either way
    if backend == "engine" and (ending in ("cut", "error", "deadline") or content in ("tools", "thoughts")):
        return False  # the tiny model writes neither, and never stalls
    if backend in STRATEGIES and (content in ("tools", "structured") or ending == "error"):
        return False  # an error of the model is a cut, whenever it comes
    if backend == "retrieval" and content == "thoughts":
        return False
    refused = (content == "image" and backend in ("engine", "scripted", *STRATEGIES)) or (
        api == "completions" and backend == "strategy"
    )
    if refused and ending not in (None, "complete"):
        return False
    if backend == "engine" and ending == "disconnect" and (content == "structured" or case.get("stream") is False):
        return False  # it is done too soon to be left
    return not (content in ("tools", "structured") and ending == "length")  # half an object is not to be compared


Part = tuple[tuple[str, Any], ...]
WANTED = [*combinations(list(AXES)[:5], 3), *combinations(AXES, 2)]
OF_AXIS = {name: [names for names in WANTED if name in names] for name in AXES}


def cases() -> list[Case]:
    """A covering array: each possible pair of values, and each triple of the first five axes, is in some case."""
    parts = (tuple(zip(names, values, strict=True)) for names in WANTED for values in product(*map(AXES.get, names)))
    missing: dict[Part, None] = {part: None for part in parts if possible(dict(part))}
    draw, found = random.Random(44), []
    while missing:
        grown = [_grown(dict(next(iter(missing))), missing, draw) for _ in range(8)]
        best = max(grown, key=lambda case: len(_covered(case, missing)))
        for part in _covered(best, missing):
            del missing[part]
        found.append(Case(**best))
    return found


def _grown(case: dict[str, Any], missing: dict[Part, None], draw: random.Random) -> dict[str, Any]:
    """`case` with a value for each other axis, the one that covers most of what is missing."""
    for name in draw.sample(list(AXES), len(AXES)):
        if name not in case:
            options = [option for value in AXES[name] if possible(option := case | {name: value})]
            wanted = OF_AXIS[name]  # what else is covered is the same in all options
            case = max(options, key=lambda option: (len(_covered(option, missing, wanted)), draw.random()))
    return case


def _covered(case: dict[str, Any], missing: dict[Part, None], wanted: Sequence[tuple[str, ...]] = WANTED) -> list[Part]:
    parts = (tuple((name, case[name]) for name in names) for names in wanted if all(name in case for name in names))
    return [part for part in parts if part in missing]


def other_way(case: Case) -> Case:
    """The same request whole instead of streamed, or streamed instead of whole."""
    return Case(**asdict(case) | {"stream": not case.stream})


assert [field.name for field in fields(Case)] == list(AXES)
