"""What is compared on each engine: no drafts, the engine's own drafters, ours; each with several draft lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

OFF = "off"


class EngineName(StrEnum):
    vllm = "vllm"
    sglang = "sglang"


COMMANDS = {
    EngineName.vllm: "vllm serve {model} --served-model-name model --host 127.0.0.1 --port {port}",
    EngineName.sglang: "python -m sglang.launch_server --model-path {model} --served-model-name model"
    " --host 127.0.0.1 --port {port}",
}
WIDTHS = {EngineName.vllm: (7, 15, 32), EngineName.sglang: (8, 16, 32)}
"""vLLM: drafted tokens of a chain; SGLang: tokens of a tree, the last one of the context included."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a server is started: its `drafter`, further arguments, variables, and whether it has our cache."""

    engine: EngineName
    drafter: str
    width: int = 0
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False

    @property
    def key(self) -> str:
        return f"{self.engine} {self.drafter}" + (f" {self.width}" if self.width else "")

    def environment(self, state: Path) -> dict[str, str]:
        """The environment variables, with a folder below `state` for the cache of this variant alone."""
        place = {"AGENTSPEC_CACHE_PATH": str(state / self.key.replace(" ", "-"))} if self.cached else {}
        return {**self.variables, **place}


def variants(engine: EngineName) -> Iterator[Variant]:
    """All variants of an engine, the one without drafts first."""
    switch = f"AGENTSPEC_{engine.upper()}"
    yield Variant(engine, OFF, variables={switch: "off"})
    for width in WIDTHS[engine]:
        yield from _vllm(width, switch) if engine is EngineName.vllm else _sglang(width, switch)


def _vllm(width: int, switch: str) -> Iterator[Variant]:
    def speculative(method: str) -> tuple[str, ...]:
        chosen: dict[str, Any] = {"method": method, "num_speculative_tokens": width}
        return ("--speculative-config", json.dumps(chosen))

    off, v2, padded = {switch: "off"}, {f"{switch}_V2": "on"}, {f"{switch}_PAD": "on"}
    yield Variant(EngineName.vllm, "Arctic", width, speculative("suffix"), off)
    yield Variant(EngineName.vllm, "agentspec", width, speculative("suffix"), cached=True)
    yield Variant(EngineName.vllm, "agentspec padded", width, speculative("suffix"), padded, cached=True)
    yield Variant(EngineName.vllm, "ngram_gpu", width, speculative("ngram_gpu"), off)
    yield Variant(EngineName.vllm, "agentspec V2", width, speculative("ngram_gpu"), v2, cached=True)


def _sglang(width: int, switch: str) -> Iterator[Variant]:
    arguments = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(width))
    yield Variant(EngineName.sglang, "NGRAM", width, arguments, {switch: "off"})
    yield Variant(EngineName.sglang, "agentspec", width, arguments, cached=True)
