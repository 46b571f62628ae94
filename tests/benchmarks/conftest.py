from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.benchmarks import agent, decode, runs

SHORT = 40


@pytest.fixture(params=["tiny", pytest.param("smollm2-135m", marks=(pytest.mark.long, pytest.mark.model))])
def model(request: pytest.FixtureRequest, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a benchmark runs: a tiny model with short answers and transformers in a thread, or the default model."""
    if request.param != "tiny":
        return str(request.param)
    for module in (agent, decode):
        monkeypatch.setattr(module, "MAX_TOKENS", SHORT)
        monkeypatch.setattr(module, "GREEDY", replace(module.GREEDY, max_tokens=SHORT))
    monkeypatch.setattr(runs, "ProcessPoolExecutor", _thread)
    return str(tiny_model)


def _thread(workers: int, _context: Any, initializer: Any, arguments: Any) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, initializer=initializer, initargs=arguments)
