"""Compares vLLM servers without drafts, with other drafters and with agentspec's, on the same prompts.

All servers run at once, but only one answers at a time, in an order that rotates from prompt to prompt, so that a busy
machine affects all servers alike; an idle vLLM needs almost no processor time. A step is one engine step, which sends
one chunk of a stream.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from agentspec.backends.openai.prediction import FIELD as PREDICTION
from agentspec.backends.vllm.drafting import DraftTurn, ServerDrafter
from agentspec.benchmarks import report
from agentspec.benchmarks.cache.synthetic_text import synthetic_tokens
from agentspec.benchmarks.report import MIN_PAIRS, Progress, Ratio, RatioGoal, paired_ratio, rotated
from agentspec.benchmarks.vllm.client import CLIENTS, COLD, MAX_TOKENS, RESTARTED, TOGETHER, WARM, ClientAnswer, ask
from agentspec.benchmarks.vllm.server import SUFFIX, VllmServer
from agentspec.cache import SuffixCache
from agentspec.cache.index import DEPTH
from agentspec.recordings.prompt_sets import load_prompts

CONTROL_TOKENS = 128
SETTLE = 1.5  # seconds before a request: the threads of the server that was asked before still turn for a while
NONE, NGRAM, ARCTIC = "none", "ngram", "suffix, Arctic"
PLUGIN, PREDICTING = "suffix, agentspec", "agentspec, prediction alone"
CONTROL = "control"
PREDICTED, MISPREDICTED = "prediction is the answer", "prediction of another answer"

# Sizes in tokens for measuring the drafter alone, without a server.
CACHED = 1_000_000
OUTPUT = PROMPT = 1000
STEPS = 400
STEP_SECONDS = 0.01
MOST = 32

Goal = tuple[tuple[str, str], tuple[str, str], float]

GOALS: tuple[Goal, ...] = (
    ((COLD, PLUGIN), (COLD, ARCTIC), 1.0),
    ((WARM, PLUGIN), (WARM, ARCTIC), 1.05),
    ((RESTARTED, PLUGIN), (WARM, PLUGIN), 0.95),
    ((CONTROL, PLUGIN), (CONTROL, NONE), 0.98),
    ((PREDICTED, PREDICTING), (PREDICTED, NONE), 2.5),
    ((MISPREDICTED, PREDICTING), (MISPREDICTED, NONE), 0.97),
)
DRAFTING_MS = 0.4
COLUMNS = ("server", "tok/s", "tokens/step", "drafts accepted", "drafting ms", f"same as {NONE}")


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    """Where vLLM and the model are, and further options for starting servers."""

    environment: Path
    model: Path
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class DraftingCost:
    """Milliseconds of drafting per step."""

    requests: int
    median_ms: float
    p99_ms: float
    drafted: float  # tokens per step


@dataclass(slots=True)
class VllmBenchReport:
    """Answers by pass and server, acceptance by server, drafting times from servers' logs and of the drafter alone."""

    drafting: DraftingCost
    answers: dict[str, dict[str, list[ClientAnswer]]] = field(default_factory=dict)
    acceptance: dict[str, float] = field(default_factory=dict)
    elapsed: dict[str, float] = field(default_factory=dict)  # of all answers at once, by server
    drafting_ms: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, server: str, answer: ClientAnswer) -> None:
        self.answers.setdefault(part, {}).setdefault(server, []).append(answer)

    def speed(self, part: str, server: str) -> float:
        answers = self.answers[part][server]
        seconds = self.elapsed[server] if part == TOGETHER else sum(answer.seconds for answer in answers)
        return sum(answer.tokens for answer in answers) / seconds

    def tokens_per_step(self, part: str, server: str) -> float:
        answers = self.answers[part][server]
        return sum(answer.tokens for answer in answers) / sum(answer.steps for answer in answers)

    def ratio(self, server: tuple[str, str], baseline: tuple[str, str]) -> Ratio:
        """The ratio of speeds over the prompts. `server` and `baseline` are each a pass and a server."""
        one, other = ([a.tokens / a.seconds for a in self.answers[part][name]] for part, name in (server, baseline))
        return paired_ratio(one, other)

    def identical(self, part: str, server: str) -> int:
        """How many texts equal the texts of the server without drafts."""
        pairs = zip(self.answers[part][server], self.answers[COLD][NONE], strict=False)
        return sum(one.text == other.text for one, other in pairs)

    def show(self) -> Iterator[RenderableType]:
        for part, servers in self.answers.items():
            title = f"{part}: {len(next(iter(servers.values())))} answers"
            yield report.table(title, COLUMNS, (self._row(part, server) for server in servers))
        yield from self._goal_lines()
        drafting = self.drafting
        yield (
            f"  drafting a step of {drafting.requests} requests, 1 M cached tokens: {drafting.median_ms:.2f} ms median,"
            f" {drafting.p99_ms:.2f} ms p99, goal {DRAFTING_MS} ms:"
            f" {'met' if drafting.median_ms <= DRAFTING_MS else 'missed'}"
        )

    def _goal_lines(self) -> Iterator[str]:
        for (part, server), (base_part, baseline), least in GOALS:
            if baseline in self.answers.get(base_part, {}) and len(self.answers[part][server]) >= MIN_PAIRS:
                ratio = self.ratio((part, server), (base_part, baseline))
                yield RatioGoal(f"{server} {part}", f"{baseline} {base_part}", least).line(ratio)

    def _row(self, part: str, server: str) -> tuple[str, ...]:
        accepted, drafting = self.acceptance.get(server), self.drafting_ms.get(server)
        count = len(next(iter(self.answers[part].values())))
        return (
            server,
            f"{self.speed(part, server):.1f}",
            f"{self.tokens_per_step(part, server):.2f}",
            "-" if accepted is None else f"{accepted:.0%}",
            "-" if drafting is None else f"{drafting:.2f}",
            "-" if part == CONTROL else f"{self.identical(part, server)} of {count}",
        )

    def data(self) -> dict[str, Any]:
        return asdict(self)


def variants(environment: Path, state: Path) -> dict[str, tuple[Mapping[str, Any] | None, dict[str, str]]]:
    """The speculative configuration and the environment variables of each server."""
    off = {"AGENTSPEC_VLLM": "off"}
    found: dict[str, tuple[Mapping[str, Any] | None, dict[str, str]]] = {
        NONE: (None, off),
        NGRAM: ({"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 5, "prompt_lookup_min": 2}, off),
    }
    if any(environment.glob("lib/python*/site-packages/arctic_inference")):
        found[ARCTIC] = (SUFFIX, off)
    found[PLUGIN] = (SUFFIX, {"AGENTSPEC_CACHE_PATH": str(state / "suffix")})
    found[PREDICTING] = (SUFFIX, {"AGENTSPEC_CACHE__STORE": "false"})
    return found


def run_vllm(
    place: VllmInstallation, *, limit: int | None, controls: int, predictions: bool = False, progress: Progress
) -> VllmBenchReport:
    """Run every pass on every server, or only those with `predictions` on the two servers that these need. Raises
    `RuntimeError` if a server does not start.
    """
    progress("drafting alone")
    found = VllmBenchReport(drafting_cost())
    prompts = load_prompts("edit_short")[:limit]
    with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder:
        state = Path(folder)
        chosen = variants(place.environment, state)
        if predictions:
            chosen = {name: chosen[name] for name in (NONE, PREDICTING)}
        with launched(chosen, place, state, progress) as servers:
            _passes(found, (COLD,) if predictions else (COLD, WARM), servers, prompts, progress)
            _predictions(found, {name: servers[name] for name in (NONE, PREDICTING)}, prompts, progress)
            if not predictions:
                _control(found, servers, controls, progress)
                _together(found, servers, prompts, progress)
            _figures(found, servers)
        if predictions:
            return found
        kept = {name: chosen[name] for name in (ARCTIC, PLUGIN) if name in chosen}
        with launched(kept, place, state, progress) as servers:
            _passes(found, (RESTARTED,), servers, prompts, progress)
    return found


@contextmanager
def launched(
    chosen: Mapping[str, tuple[Mapping[str, Any] | None, dict[str, str]]],
    place: VllmInstallation,
    state: Path,
    progress: Progress,
) -> Iterator[dict[str, VllmServer]]:
    """Start all servers, and warm each up with one short answer."""
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


def _ask_alone(server: VllmServer, prompt: str, **options: Any) -> ClientAnswer:
    """Ask a server when the others rest."""
    time.sleep(SETTLE)
    return ask(server, prompt, **options)


def _passes(
    found: VllmBenchReport,
    parts: Sequence[str],
    servers: Mapping[str, VllmServer],
    prompts: Sequence[str],
    progress: Progress,
) -> None:
    for part in parts:
        for index, prompt in enumerate(prompts):
            progress(f"{part}: prompt {index + 1} of {len(prompts)}")
            for name, server in rotated(servers, index):
                found.add(part, name, _ask_alone(server, prompt, max_tokens=MAX_TOKENS))


def _predictions(
    found: VllmBenchReport, servers: Mapping[str, VllmServer], prompts: Sequence[str], progress: Progress
) -> None:
    """Each prompt with its own answer as the prediction, and with that of the next prompt; nothing else is known."""
    texts = [answer.text for answer in found.answers[COLD][NONE]]
    for part, shift in ((PREDICTED, 0), (MISPREDICTED, 1)):
        for index, prompt in enumerate(prompts):
            progress(f"{part}: prompt {index + 1} of {len(prompts)}")
            for name, server in rotated(servers, index):
                predicted = {PREDICTION: server.tokenize(texts[(index + shift) % len(texts)])}
                found.add(part, name, _ask_alone(server, prompt, max_tokens=MAX_TOKENS, vllm_xargs=predicted))


def _control(found: VllmBenchReport, servers: Mapping[str, VllmServer], rounds: int, progress: Progress) -> None:
    """Request sampled answers that do not repeat; they show the cost of useless drafts for each suffix method."""
    compared = {name: servers[name] for name in (NONE, ARCTIC, PLUGIN) if name in servers}
    prompts = load_prompts("control")
    for index in range(rounds):
        progress(f"{CONTROL}: answer {index + 1} of {rounds}")
        for name, server in rotated(compared, index):
            prompt = prompts[index % len(prompts)]
            answer = _ask_alone(server, prompt, max_tokens=CONTROL_TOKENS, temperature=1.0, seed=index)
            found.add(CONTROL, name, answer)


def _together(
    found: VllmBenchReport, servers: Mapping[str, VllmServer], prompts: Sequence[str], progress: Progress
) -> None:
    for name, server in servers.items():
        progress(f"{TOGETHER}: {name}")
        started = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            for answer in pool.map(lambda prompt, asked=server: ask(asked, prompt, max_tokens=MAX_TOKENS), prompts):
                found.add(TOGETHER, name, answer)
        found.elapsed[name] = time.perf_counter() - started


def _figures(found: VllmBenchReport, servers: Mapping[str, VllmServer]) -> None:
    for name, server in servers.items():
        drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
        if drafted:
            found.acceptance[name] = server.metric("vllm:spec_decode_num_accepted_tokens_total") / drafted
        logged = [line for line in server.text().splitlines() if "ms (median)" in line]
        if logged:
            medians = sorted(float(line.partition("drafting ")[2].split(" ")[0]) for line in logged)
            found.drafting_ms[name] = medians[len(medians) // 2]


def drafting_cost(requests: int = 8, cached: int = CACHED) -> DraftingCost:
    """The cost of drafting for requests whose text repeats `cached` cached tokens, in steps of a fixed time."""
    text = synthetic_tokens(cached + requests * (PROMPT + 8 * STEPS))
    with SuffixCache.open() as cache:
        for start in range(0, cached, OUTPUT):
            with cache.request(text[max(0, start - 64) : start], session="past") as request:
                request.extend(text[start : start + OUTPUT])
        drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), int(text.max()) + 1)
        seconds, drafted = _draft_steps(drafter, np.split(text[cached:], requests))
        drafter.close()
    median, p99 = np.percentile(1e3 * np.array(seconds[STEPS // 4 :]), [50, 99])
    return DraftingCost(requests, float(median), float(p99), drafted / STEPS)


def _draft_steps(drafter: ServerDrafter, texts: list[np.ndarray]) -> tuple[list[float], int]:
    states = [drafter.begin(text[:PROMPT]) for text in texts]
    drafter.flush()
    at = [PROMPT] * len(texts)
    fresh = [text[PROMPT : PROMPT + 1] for text in texts]
    seconds, drafted = [], 0
    for _ in range(STEPS):
        ends = [text[: end + len(new)][-DEPTH:] for text, end, new in zip(texts, at, fresh, strict=True)]
        turns = [DraftTurn(*turn, MOST) for turn in zip(states, fresh, ends, strict=True)]
        started = time.perf_counter()
        chains = drafter.propose(turns)
        seconds.append(time.perf_counter() - started)
        drafted += sum(map(len, chains))
        for i, chain in enumerate(chains):
            at[i] += len(fresh[i])
            fresh[i] = _verified(chain, texts[i][at[i] :])
        time.sleep(STEP_SECONDS)
    return seconds, drafted


def _verified(chain: list[int], text: np.ndarray) -> np.ndarray:
    """The drafted tokens, at most seven, that `text` begins with, and the token of `text` after them."""
    right = next((i for i, token in enumerate(chain) if token != text[i]), len(chain))
    return text[: min(7, right) + 1]
