"""Strategies over two `agentspec serve` processes, whose tokenizer endpoints let a role send token ids."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.reasoning.settings import LookaheadSettings, SpecReasonSettings, SpeculativeThinkingSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.types import GenerateRequest, SamplingParams, StepSpeculation

pytestmark = [pytest.mark.anyio, pytest.mark.model, pytest.mark.slow]
pytest.importorskip("torch")

COMMON: dict[str, Any] = {
    "base": "large",
    "small": "tiny",
    "think_start": "",
    "think_end": "",
    "budget_tokens": 24,
    "step_tokens": 12,
}
STRATEGIES = {
    "kept": SpecReasonSettings(**COMMON, threshold=0),
    "none": SpecReasonSettings(**COMMON, threshold=9.5, score="average"),
    "handed": SpeculativeThinkingSettings(**COMMON, small_reasons=False, begin_tokens=8),
    "ahead": LookaheadSettings(**COMMON, depth=2),
}


@contextmanager
def serving(model: str, log: Path) -> Iterator[OpenAISettings]:
    """`agentspec serve --model MODEL` in a process of its own, as the endpoint that it is to others."""
    program = "import sys; from agentspec.cli import app; sys.argv[0] = 'agentspec'; app()"
    command = [sys.executable, "-c", program, "serve", "--model", model, "--port", "0", "--no-store"]
    with log.open("w") as stream, subprocess.Popen(command, stderr=stream) as process:
        limit = time.monotonic() + 240

        def wait_for(found: Callable[[], bool]) -> None:
            while not found():
                assert process.poll() is None and time.monotonic() < limit, log.read_text()
                time.sleep(0.1)

        try:
            wait_for(lambda: "running on" in log.read_text())
            line = next(line for line in log.read_text().splitlines() if "running on" in line)
            url = json.loads(line)["event"].split()[3]
            wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
            yield OpenAISettings(base_url=f"{url}/v1", model=model)  # type: ignore[arg-type]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def configured(default_model: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        backends = {name: stack.enter_context(serving("smollm2-135m", logs / name)) for name in ("large", "tiny")}
        yield Settings(backends=backends, models=STRATEGIES)  # type: ignore[arg-type]


def problem() -> str:
    first = (Path(__file__).parent / "problems.jsonl").read_text().splitlines()[0]
    return str(json.loads(first)["problem"])


async def ask(runtime: Runtime, model: str, *, speculation: bool = True) -> tuple[str, StepSpeculation]:
    """The thinking, and what was said of it."""
    messages = [{"role": "user", "content": problem()}]
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    request = GenerateRequest(model, messages=messages, sampling=sampling, speculation=speculation)
    deltas = [delta async for delta in runtime.generate(request)]
    told = deltas[-1].speculation
    assert isinstance(told, StepSpeculation) and told.degraded == {}
    return "".join(delta.extra.get("reasoning", "") for delta in deltas), told


async def test_every_strategy_thinks_across_two_processes(configured: Settings) -> None:
    async with Runtime(configured) as runtime:
        thought = {model: await ask(runtime, model) for model in STRATEGIES}
        alone, _ = await ask(runtime, "none", speculation=False)
    for text, told in thought.values():
        assert text.strip() and 0 < sum(told.kept_tokens.values()) <= 24
    none, told = thought["none"]
    assert none.encode() == alone.encode() and told.proposed_steps == 0
    assert thought["kept"][1].kept_tokens["base"] == 0 < thought["handed"][1].kept_tokens["base"]
