"""Runs all variants of the engines, one server at a time, and keeps what was measured, so that a run can go on later.

If asked for, the local engine's figures (`agentspec bench gpu`) come first, in a process of their own that leaves
the device to the servers. A variant is the unit of work: its server answers the prompts cold and warm, then eight at
once; it is stopped and started again, and answers once more. The file with the results is written after each variant,
whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.engines.client import CLIENTS, COLD, MAX_TOKENS, RESTARTED, TOGETHER, WARM, ask
from agentspec.benchmarks.engines.server import ServerProcess, free_port
from agentspec.benchmarks.engines.variants import COMMANDS, OFF, EngineName, Variant, variants
from agentspec.benchmarks.report import Progress
from agentspec.errors import ConfigurationError

FORMAT = 1  # of the results
LOCAL = "local engine"
LOCAL_SECONDS = 570.0  # at most, so that one step of a run fits into ten minutes
AGENTSPEC = (sys.executable, "-c", "from agentspec.cli import app; app()")
COLUMNS = ("server", "part", "tok/s", "tokens/step", f"same as {OFF}")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to run. A variant that would begin after `seconds` is left for the next call; `commands` start a server,
    with `{model}` and `{port}` in them. Everything is kept in the file `results` and in a folder beside it. `local` are
    the options with which `agentspec bench gpu` measures the local engine; None leaves that out.
    """

    engines: Sequence[EngineName]
    model: str
    results: Path
    prompts: Sequence[str]
    seconds: float = float("inf")
    commands: Mapping[EngineName, str] = field(default_factory=lambda: COMMANDS)
    max_tokens: int = MAX_TOKENS
    start_seconds: float = 900.0
    local: Sequence[str] | None = None

    @property
    def subject(self) -> dict[str, Any]:
        """What results must have in common to be compared."""
        asked = hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()
        commands = {engine.value: self.commands[engine] for engine in EngineName}
        return {
            "format": FORMAT,
            "model": self.model,
            "prompts": asked,
            "max_tokens": self.max_tokens,
            "commands": commands,
        }


@dataclass(slots=True)
class EngineResults:
    """What was measured of each variant by its key: parts with their answers, or the reason why there are none; of the
    local engine, its figures.
    """

    subject: dict[str, Any]
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # variants that were not run yet

    def show(self) -> Iterator[RenderableType]:
        yield report.table("Engines", COLUMNS, self._rows())
        for key, found in self.measured.items():
            if "shown" in found:
                yield found["shown"]
            if "failed" in found:
                yield f"  {key}: {found['failed'].strip().splitlines()[-1]}"
        if self.left:
            yield f"  {len(self.left)} left, run again to go on: {', '.join(self.left)}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for key, found in self.measured.items():
            for part, measured in found.get("parts", {}).items():
                tokens = sum(answer["tokens"] for answer in measured["answers"])
                steps = sum(answer["steps"] for answer in measured["answers"])
                speed, same = f"{tokens / measured['seconds']:.1f}", self._same(key, measured["answers"])
                yield (key, part, speed, f"{tokens / steps:.2f}", same)

    def _same(self, key: str, answers: Sequence[Mapping[str, Any]]) -> str:
        """How many answers have the text of the server without drafts."""
        plain = self.measured.get(f"{key.partition(' ')[0]} {OFF}", {}).get("parts", {}).get(COLD)
        if plain is None:
            return "-"
        pairs = zip(answers, plain["answers"], strict=True)
        return f"{sum(one['text'] == other['text'] for one, other in pairs)} of {len(answers)}"

    def data(self) -> dict[str, Any]:
        return asdict(self)


def run_engines(plan: EnginePlan, *, progress: Progress) -> EngineResults:
    """Run what is not in the results yet, and last what failed before. A server that does not start is noted, and the
    others go on.

    Raises `ConfigurationError` if the results are of another model, other prompts or commands, or cannot be read.
    """
    results, until = read_results(plan), time.monotonic() + plan.seconds
    wanted: dict[str, Callable[[], dict[str, Any]]] = {}
    if plan.local is not None:
        wanted[LOCAL] = partial(_local, plan, progress)
    for engine in plan.engines:
        wanted |= {variant.key: partial(_measured, variant, plan, progress) for variant in variants(engine)}
    missing = [key for key in wanted if key not in results.measured]
    failed = [key for key in wanted if results.measured.get(key, {}).keys() == {"failed"}]
    for key in missing + failed:
        if time.monotonic() < until:
            results.measured[key] = wanted[key]()
            write_results(results, plan.results)
    results.left = [key for key in wanted if key not in results.measured]
    return results


def read_results(plan: EnginePlan) -> EngineResults:
    """The results so far; empty if there is no file yet."""
    try:
        kept = json.loads(plan.results.read_text())
        subject, measured = kept["subject"], kept["measured"]
    except FileNotFoundError:
        return EngineResults(plan.subject)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{str(plan.results)!r} holds no results to go on with: {error!r}") from None
    if subject != plan.subject:
        other = [name for name, value in plan.subject.items() if subject.get(name) != value]
        raise ConfigurationError(f"{str(plan.results)!r} was measured with other {', '.join(other)}: name another file")
    return EngineResults(subject, measured)


def write_results(results: EngineResults, path: Path) -> None:
    """Write the results in one go, so that a run that is cut off loses none."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        kept = {"subject": results.subject, "measured": results.measured, "conditions": report.conditions()}
        json.dump(kept, file, indent=1)
    os.replace(file.name, path)


def _local(plan: EnginePlan, progress: Progress) -> dict[str, Any]:
    """The figures of the local engine, and what the command printed; `failed` says that a check did, or all of it."""
    progress(f"{LOCAL}: agentspec bench gpu")
    with tempfile.TemporaryDirectory() as folder:
        file, seconds = Path(folder, "gpu.json"), min(LOCAL_SECONDS, plan.seconds)
        command = [*AGENTSPEC, "bench", "gpu", "--json", str(file), "--seconds", str(seconds), *(plan.local or ())]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        found: dict[str, Any] = {"shown": done.stdout}
        if done.returncode:
            found["failed"] = done.stderr.strip() or f"agentspec bench gpu ended with status {done.returncode}"
        if file.exists():
            found["figures"] = json.loads(file.read_text())
        return found


def _measured(variant: Variant, plan: EnginePlan, progress: Progress) -> dict[str, Any]:
    state = plan.results.with_suffix(".state")
    cache = variant.environment(state).get("AGENTSPEC_CACHE_PATH")
    if cache:
        shutil.rmtree(cache, ignore_errors=True)  # of a run that was cut off: this one begins cold
    try:
        parts = _session(variant, plan, state, progress, {COLD: _in_turn, WARM: _in_turn, TOGETHER: _at_once})
        parts |= _session(variant, plan, state, progress, {RESTARTED: _in_turn})
    except (RuntimeError, urllib.error.URLError, OSError) as error:
        return {"failed": str(error)}
    return {"parts": parts}


Part = Callable[[ServerProcess, EnginePlan], list[dict[str, Any]]]


def _session(
    variant: Variant, plan: EnginePlan, state: Path, progress: Progress, parts: Mapping[str, Part]
) -> dict[str, Any]:
    """Start the variant's server, measure the parts, and stop it."""
    state.mkdir(exist_ok=True)
    port, found = free_port(), {}
    command = [word.format(model=plan.model, port=port) for word in shlex.split(plan.commands[variant.engine])]
    progress(f"{variant.key}: starting")
    server = ServerProcess(
        log=state / f"{variant.key.replace(' ', '-')}.log",
        command=[*command, *variant.arguments],
        variables=variant.environment(state),
        port=port,
        start_seconds=plan.start_seconds,
    )
    with server:
        ask(server, "Say hello.", max_tokens=8)
        for part, answered in parts.items():
            progress(f"{variant.key}: {part}")
            started = time.perf_counter()
            answers = answered(server, plan)
            found[part] = {"seconds": time.perf_counter() - started, "answers": answers}
    return found


def _in_turn(server: ServerProcess, plan: EnginePlan) -> list[dict[str, Any]]:
    return [asdict(ask(server, prompt, max_tokens=plan.max_tokens)) for prompt in plan.prompts]


def _at_once(server: ServerProcess, plan: EnginePlan) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = pool.map(lambda prompt: ask(server, prompt, max_tokens=plan.max_tokens), plan.prompts)
        return [asdict(answer) for answer in answers]
