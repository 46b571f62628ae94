"""vLLM with and without drafters, ours among them: the same prompts to servers that run side by side.

All servers are up at once and only one is asked at a time, in an order that rotates from prompt to prompt, so that a
busy machine hits all of them alike; an idle vLLM takes next to no processor time. A step is one engine step, which is
one chunk of a stream.
"""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentspec.benchmarks.stats import Ratio, paired_ratio, rotated
from agentspec.benchmarks.vllm_server import CUSTOM, SUFFIX, VllmServer
from agentspec.recordings.prompt_sets import load_prompts

MAX_TOKENS = 512
CONTROL_TOKENS = 128
NONE, NGRAM, ARCTIC = "none", "ngram", "suffix, Arctic"
PLUGIN, CUSTOM_CLASS = "suffix, agentspec", "custom_class, agentspec"
COLD, WARM, RESTARTED, TOGETHER, CONTROL = "cold", "warm", "after restart", "8 at once", "control"
CLIENTS = 8

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where vLLM and the model are, and with what further options servers start."""

    environment: Path
    model: Path
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as a client saw it."""

    text: str
    tokens: int
    steps: int
    seconds: float


@dataclass(slots=True)
class Report:
    """Answers by pass and server; acceptance by server; what servers logged of drafting."""

    answers: dict[str, dict[str, list[Answer]]] = field(default_factory=dict)
    acceptance: dict[str, float] = field(default_factory=dict)
    elapsed: dict[str, float] = field(default_factory=dict)  # of all answers at once, by server
    drafting_ms: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, server: str, answer: Answer) -> None:
        self.answers.setdefault(part, {}).setdefault(server, []).append(answer)

    def speed(self, part: str, server: str) -> float:
        answers = self.answers[part][server]
        seconds = self.elapsed[server] if part == TOGETHER else sum(answer.seconds for answer in answers)
        return sum(answer.tokens for answer in answers) / seconds

    def tokens_per_step(self, part: str, server: str) -> float:
        answers = self.answers[part][server]
        return sum(answer.tokens for answer in answers) / sum(answer.steps for answer in answers)

    def ratio(self, server: tuple[str, str], baseline: tuple[str, str]) -> Ratio:
        """Of speeds, prompt by prompt; each is a pass and a server."""
        one, other = ([a.tokens / a.seconds for a in self.answers[part][name]] for part, name in (server, baseline))
        return paired_ratio(one, other)

    def identical(self, part: str, server: str) -> int:
        """How many texts equal those of the server without drafts."""
        pairs = zip(self.answers[part][server], self.answers[COLD][NONE], strict=False)
        return sum(one.text == other.text for one, other in pairs)


def variants(environment: Path, state: Path) -> dict[str, tuple[Mapping[str, Any] | None, dict[str, str]]]:
    """Each server's speculative configuration and variables."""
    off = {"AGENTSPEC_VLLM": "off"}
    found: dict[str, tuple[Mapping[str, Any] | None, dict[str, str]]] = {
        NONE: (None, off),
        NGRAM: ({"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 5, "prompt_lookup_min": 2}, off),
    }
    if any(environment.glob("lib/python*/site-packages/arctic_inference")):
        found[ARCTIC] = (SUFFIX, off)
    for name, speculative in ((PLUGIN, SUFFIX), (CUSTOM_CLASS, CUSTOM)):
        found[name] = (speculative, {"AGENTSPEC_CACHE_PATH": str(state / name.partition(",")[0])})
    return found


def run_vllm(place: Place, *, limit: int | None, controls: int, progress: Progress) -> Report:
    """Every pass over every server. Raises `RuntimeError` where a server does not start."""
    report = Report()
    prompts = load_prompts("edit_short")[:limit]
    with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder:
        state = Path(folder)
        chosen = variants(place.environment, state)
        with _servers(chosen, place, state, progress) as servers:
            _passes(report, (COLD, WARM), servers, prompts, progress)
            _control(report, servers, controls, progress)
            _together(report, servers, prompts, progress)
            _figures(report, servers)
        kept = {name: chosen[name] for name in (ARCTIC, PLUGIN, CUSTOM_CLASS) if name in chosen}
        with _servers(kept, place, state, progress) as servers:
            _passes(report, (RESTARTED,), servers, prompts, progress)
    return report


@contextmanager
def _servers(
    chosen: Mapping[str, tuple[Mapping[str, Any] | None, dict[str, str]]],
    place: Place,
    state: Path,
    progress: Progress,
) -> Iterator[dict[str, VllmServer]]:
    """All of them, warmed up by an answer that nothing is learned from."""
    with ExitStack() as stack:
        servers: dict[str, VllmServer] = {}
        for name, (speculative, variables) in chosen.items():
            progress(f"starting vLLM: {name}")
            log = state / f"{name}.log"
            servers[name] = VllmServer(
                place.environment, place.model, log, speculative, variables, place.options
            ).launch()
            stack.callback(servers[name].stop)
            servers[name].wait()
            ask(servers[name], "Say hello.", max_tokens=8)
        yield servers


def _passes(
    report: Report, parts: Sequence[str], servers: Mapping[str, VllmServer], prompts: Sequence[str], progress: Progress
) -> None:
    for part in parts:
        for index, prompt in enumerate(prompts):
            progress(f"{part}: prompt {index + 1} of {len(prompts)}")
            for name, server in rotated(servers, index):
                report.add(part, name, ask(server, prompt, max_tokens=MAX_TOKENS))


def _control(report: Report, servers: Mapping[str, VllmServer], rounds: int, progress: Progress) -> None:
    """Sampled answers that do not repeat: without drafts, with ours, and with what any suffix method costs."""
    compared = {name: servers[name] for name in (NONE, ARCTIC, PLUGIN, CUSTOM_CLASS) if name in servers}
    prompts = load_prompts("control")
    for index in range(rounds):
        progress(f"{CONTROL}: answer {index + 1} of {rounds}")
        for name, server in rotated(compared, index):
            prompt = prompts[index % len(prompts)]
            report.add(CONTROL, name, ask(server, prompt, max_tokens=CONTROL_TOKENS, temperature=1.0, seed=index))


def _together(report: Report, servers: Mapping[str, VllmServer], prompts: Sequence[str], progress: Progress) -> None:
    for name, server in servers.items():
        progress(f"{TOGETHER}: {name}")
        started = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            for answer in pool.map(lambda prompt, asked=server: ask(asked, prompt, max_tokens=MAX_TOKENS), prompts):
                report.add(TOGETHER, name, answer)
        report.elapsed[name] = time.perf_counter() - started


def _figures(report: Report, servers: Mapping[str, VllmServer]) -> None:
    for name, server in servers.items():
        drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
        if drafted:
            report.acceptance[name] = server.metric("vllm:spec_decode_num_accepted_tokens_total") / drafted
        logged = [line for line in server.text().splitlines() if "ms (median)" in line]
        if logged:
            medians = sorted(float(line.partition("drafting ")[2].split(" ")[0]) for line in logged)
            report.drafting_ms[name] = medians[len(medians) // 2]


def ask(
    server: VllmServer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    timeout: float = 600.0,
    **more: Any,
) -> Answer:
    """One chat answer, streamed. Raises `urllib.error.URLError` where the server does not give one."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    pieces: list[str] = []
    steps = tokens = 0
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage")
            tokens = usage["completion_tokens"] if usage else tokens
            for choice in chunk["choices"]:
                steps += "role" not in choice["delta"] or bool(choice["delta"].get("content"))
                pieces.append(choice["delta"].get("content") or "")
    return Answer("".join(pieces), tokens, max(1, steps), time.perf_counter() - started)
