"""Checks and times the local engine on a GPU within minutes and without model files: random weights of a real shape.

First the checks: small models must give the same answers with speculation off, on and side by side. Then the timings:
a verification by its size, a one-token step against the limit that memory bandwidth sets, and recorded answers forced
as targets. Sections that did not fit into the time are listed as left out.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import RenderableType

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.exactness import ExactnessCase, check_exactness
from agentspec.backends.torch.loader import LoadedModel, choose_device, choose_dtype
from agentspec.backends.torch.model.device import synchronize
from agentspec.backends.torch.model.graphs.recording import count_host_syncs, record_graphs
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.text.model_text import read_tokenizer
from agentspec.benchmarks import report
from agentspec.benchmarks.gpu.random_model import ON, ForcedEngine, build, byte_tokenizer, copied_bytes, read_bytes
from agentspec.benchmarks.report import MIN_PAIRS, Figure, Progress, Ratio, paired_ratio
from agentspec.benchmarks.runs import OFF, RunTable
from agentspec.benchmarks.traces import load_encoder, read_calls
from agentspec.cache import SuffixCache
from agentspec.types import SamplingParams

SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 4096)
PASSES, WARM_PASSES = 9, 2
PAIRS = 41  # verifications of 1 and of 32 tokens in turn, for their ratio
CHECK_SPREAD = 0.3  # deviation of the small models' weights: large enough that most of their scores are no near-ties
CHECK_TOKENS = 32
TIE = 0.1  # in types with fewer bits than float32 answers may differ where the two best scores are closer than this,
TIE_SHARE = 0.01  # in at most this share of the answers, or in one
JUDGED = "8b"  # the shape that the goals apply to
GOALS = {"airline": 2.5, "sql": 3.3}
VERIFY_GOAL, STEP_GOAL = 1.25, 2.0


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What to measure, on which device, and the most seconds to spend; `traces` need a `tokenizer` folder. The cache
    learns the first `learned` calls of each file, at most half, before the others are timed.
    """

    shape: str = "8b"
    device: str = "auto"
    dtype: str = "auto"
    seconds: float = 570.0
    traces: Sequence[Path] = ()
    tokenizer: Path | None = None
    questions: int = 50
    learned: int = 0


@dataclass(slots=True)
class GpuReport:
    """The results. `steps` maps (context, tokens of the forward) to seconds; `checks` maps requirements to outcomes."""

    shape: str
    device: str
    dtype: str
    attention: str = ""
    checks: dict[str, bool] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    steps: dict[tuple[int, int], float] = field(default_factory=dict)
    tables: list[RunTable] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        return all(self.checks.values())

    @property
    def judged(self) -> bool:
        """Whether the goals apply, which hold for one shape on a GPU."""
        return self.device != "CPU" and self.shape == JUDGED

    def show(self) -> Iterator[RenderableType]:
        title = f"{self.shape}, random weights, {self.dtype} on {self.device}, attention {self.attention or 'none'}"
        yield f"{title}: {self.seconds:.0f} s"
        for name, holds in self.checks.items():
            yield f"  {'ok' if holds else 'FAILED'}: {name}"
        rows = ((str(context), *(self._step_cell(context, size) for size in SIZES)) for context in CONTEXTS)
        yield report.table(f"ms of a verification on {self.device}", ("rows", *(f"{n} tokens" for n in SIZES)), rows)
        for table in self.tables:
            yield _recorded(table)
        yield from (f"  {figure.name}: {figure}{self._goal(figure)}" for figure in self.figures)
        yield from (f"  left out: {name}" for name in self.left_out)

    def _step_cell(self, context: int, size: int) -> str:
        seconds = self.steps.get((context, size))
        return "not measured" if seconds is None else f"{seconds * 1e3:.2f}"

    def _goal(self, figure: Figure) -> str:
        if figure.required is None:
            return ""
        bound = f"at {'most' if figure.at_most else 'least'} {figure.required:g}"
        if not self.judged:
            return f" (goal on a GPU, shape {JUDGED}: {bound}; not judged here)"
        return f", goal {bound}: {'undecided' if figure.value is None else figure.verdict}"

    def data(self) -> dict[str, Any]:
        names = ("shape", "device", "dtype", "attention", "checks", "left_out", "seconds")
        return {
            **{name: getattr(self, name) for name in names},
            "figures": [self._figure_data(figure) for figure in self.figures],
            "steps": [{"rows": rows, "tokens": size, "seconds": time} for (rows, size), time in self.steps.items()],
            "tables": [{"name": table.name, "runs": table.run_data()} for table in self.tables],
        }

    def _figure_data(self, figure: Figure) -> dict[str, Any]:
        bounds = {"least": None, "most": None, ("most" if figure.at_most else "least"): figure.required}
        open_ = not self.judged or figure.required is None or figure.value is None
        met = None if open_ or figure.verdict == "undecided" else figure.verdict == "met"
        named = {"name": figure.name, "value": figure.value, "interval": figure.interval, "unit": figure.unit}
        return {**named, **bounds, "met": met}


def _ratio_figure(name: str, ratio: Ratio | None, required: float | None, *, at_most: bool) -> Figure:
    if ratio is None:
        return Figure(name, None, "x", required=required, at_most=at_most)
    interval = (ratio.low, ratio.high)
    return Figure(name, ratio.median, "x", required=required, at_most=at_most, interval=interval)


def _recorded(table: RunTable) -> RenderableType:
    rows = (
        (way, str(len(table.runs[way])), f"{table.total_speed(way):.1f}", f"{table.tokens_per_step(way) or 1.0:.2f}")
        for way in (OFF, ON)
    )
    title = f"{table.name}: forced targets, random weights"
    return report.table(title, ("variant", "calls", "tok/s", "tokens/step"), rows)


def run_gpu(plan: GpuPlan, progress: Progress = lambda message: None) -> GpuReport:
    """Run the plan. Raises `ConfigurationError` for a device, type or file that cannot be used."""
    return GpuBench(plan, progress).run()


class GpuBench:
    """Runs a plan section by section; sections that would start too late are left out."""

    def __init__(self, plan: GpuPlan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._started = time.perf_counter()
        self._device = choose_device(plan.device)
        self._dtype = choose_dtype(plan.dtype, self._device)
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        self._report = GpuReport(plan.shape, name, str(self._dtype).removeprefix("torch."))

    def run(self) -> GpuReport:
        self._section("exactness on small models", self._check)
        self._section("the model", self._measure)
        self._report.seconds = time.perf_counter() - self._started
        return self._report

    @property
    def _late(self) -> bool:
        return time.perf_counter() - self._started > self._plan.seconds

    def _section(self, name: str, work: Callable[[], None]) -> None:
        if self._late:
            self._report.left_out.append(name)
            return
        self._progress(name)
        work()

    def _check(self) -> None:
        """Check that all answers are equal in float32 and, except at near-ties, in the model's own type."""
        for dtype in dict.fromkeys((torch.float32, self._dtype)):
            for together in (2, 8):
                name = f"{str(dtype).removeprefix('torch.')}, off = on = {together} at once"
                self._section(name, lambda d=dtype, t=together, n=name: self._verify(d, t, n))  # type: ignore[misc]

    def _verify(self, dtype: torch.dtype, together: int, name: str) -> None:
        loaded = build("tiny", byte_tokenizer(), self._device, dtype, spread=CHECK_SPREAD)
        record_graphs(loaded.target)
        settings = TorchSettings(max_active=together)
        with SuffixCache.open() as cache:
            backend = TorchBackend(loaded, settings, cache=cache)
            found = asyncio.run(_verified(backend, questions(self._plan.questions)))
        answers = 3 * len(found.answers["off"])
        gaps = [min(abs(each.gap_apart), abs(each.gap_together)) for each in found.divergences]
        near = max(gaps, default=0.0) < TIE and len(gaps) <= max(1, TIE_SHARE * answers)
        self._report.checks[name] = found.exact if dtype == torch.float32 else near
        self._report.figures.append(Figure(f"{name}: answers that part", len(gaps), f"of {answers}"))
        if gaps:
            self._report.figures.append(Figure(f"{name}: widest gap of scores where they part", max(gaps)))

    def _measure(self) -> None:
        folder = self._plan.tokenizer
        tokenizer = byte_tokenizer() if folder is None else read_tokenizer(folder)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        loaded = build(self._plan.shape, tokenizer, self._device, self._dtype)
        self._report.attention = loaded.target.attention
        self._section("forwards as CUDA graphs", lambda: self._record(loaded.target))
        self._section("verifications by size", lambda: self._time_sizes(loaded.target))
        self._section("a step against memory", lambda: self._against_memory(loaded.target))
        self._section("recorded answers", lambda: self._recorded(loaded))
        high = torch.cuda.max_memory_allocated(self._device) / 2**30 if self._device.type == "cuda" else None
        self._report.figures.append(Figure("device memory, high-water", high, "GiB"))

    def _record(self, target: TargetModel) -> None:
        """Record forwards as CUDA graphs, on a CUDA device; later sections use these graphs."""
        if self._device.type != "cuda":
            return
        launched = step_seconds(target, CONTEXTS[0], 1)
        began = time.perf_counter()
        self._report.checks["forwards are recorded as CUDA graphs"] = record_graphs(target)
        recording = time.perf_counter() - began
        ratio = launched / step_seconds(target, CONTEXTS[0], 1)
        self._report.figures += [
            Figure("recording forwards as CUDA graphs", recording, "s"),
            Figure("1-token step, launched kernel by kernel / recorded", ratio, "x"),
        ]

    def _time_sizes(self, target: TargetModel) -> None:
        for context in CONTEXTS:
            for size in SIZES:
                if self._late:
                    self._report.left_out.append(f"verify {size} over {context} rows")
                    continue
                self._report.steps[context, size] = step_seconds(target, context, size)
            ratio = None if self._late else verify_ratio(target, context)
            self._report.figures.append(
                _ratio_figure(f"verify 32 / verify 1 over {context} rows", ratio, VERIFY_GOAL, at_most=True)
            )

    def _against_memory(self, target: TargetModel) -> None:
        """Compare a one-token step with the time to read the weights once at copy bandwidth; count host waits."""
        bandwidth = copy_bandwidth(self._device)
        least = read_bytes(target) / bandwidth
        step = self._report.steps.get((CONTEXTS[0], 1)) or step_seconds(target, CONTEXTS[0], 1)
        self._report.figures += [
            Figure("copy bandwidth, read + written", bandwidth / 1e9, "GB/s"),
            Figure("weights that a step reads", read_bytes(target) / 1e9, "GB"),
            Figure("1-token step / (weight bytes / bandwidth)", step / least, "x", required=STEP_GOAL),
            Figure("host waits in a greedy step of 8", waits(target, SamplingParams(temperature=0.0))),
            Figure("host waits in a sampled step of 8", waits(target, SamplingParams(temperature=0.8, seed=0))),
        ]

    def _recorded(self, loaded: LoadedModel) -> None:
        if not self._plan.traces or self._plan.tokenizer is None:
            self._report.left_out.append("recorded answers: no traces and tokenizer were given")
            return
        encode, forced = load_encoder(self._plan.tokenizer), ForcedEngine(loaded)
        try:
            for number, path in enumerate(self._plan.traces):
                self._progress(f"recorded answers: {path.name}")
                self._replay(forced, path, read_calls(path, encode), len(self._plan.traces) - number)
        finally:
            forced.close()

    def _replay(self, forced: ForcedEngine, path: Path, calls: Sequence[Any], files: int) -> None:
        """Replay one file within its share of the remaining time."""
        now = time.perf_counter()
        deadline = now + max(0.0, self._started + self._plan.seconds - now) / files
        forced.outside = dict.fromkeys(forced.outside, 0.0)
        table = forced.replay(
            path.name.split(".")[0], calls, lambda: time.perf_counter() > deadline, self._plan.learned
        )
        done = len(table.runs.get(ON, ()))
        if left := len(calls) - done:
            self._report.left_out.append(f"{table.name}: {left} of {len(calls)} calls")
        if not done:
            return
        self._report.tables.append(table)
        ratio = table.ratio(ON, OFF) if done >= MIN_PAIRS else None
        least = next((goal for word, goal in GOALS.items() if word in table.name), None)
        seconds = sum(run.seconds for run in table.runs[ON])
        self._report.figures += [
            _ratio_figure(f"{table.name}: on / off, forced targets, random weights", ratio, least, at_most=False),
            Figure(f"{table.name}: share of the time on outside of forwards", forced.outside[ON] / seconds, ""),
        ]


async def _verified(backend: TorchBackend, asked: Sequence[ExactnessCase]) -> Any:
    try:
        return await check_exactness(backend, asked, lambda message: None)
    finally:
        await backend.aclose()


def questions(count: int) -> list[ExactnessCase]:
    """Random byte prompts. Every other prompt is answered greedily, the others are sampled with a seed."""
    rng, greedy = np.random.default_rng(0), SamplingParams(temperature=0.0, max_tokens=CHECK_TOKENS)
    samplings = [replace(greedy, temperature=0.8 * (number % 2), seed=number) for number in range(count)]
    return [
        ExactnessCase(rng.integers(0, 256, 8 + 5 * n % 40).tolist(), sampling) for n, sampling in enumerate(samplings)
    ]


@torch.inference_mode()
def step_seconds(target: TargetModel, context: int, size: int) -> float:
    """Median seconds of a forward over `context` KV slots, with a chain of `size` - 1 drafted tokens and argmax."""
    rows = _filled(target, context, size)
    return median([_clocked(target, rows, size) for _ in range(PASSES + WARM_PASSES)][WARM_PASSES:])


@torch.inference_mode()
def verify_ratio(target: TargetModel, context: int, size: int = 32) -> Ratio:
    """Seconds of a forward with a chain of `size` - 1 drafted tokens, to those of one without, the two in turn."""
    rows = _filled(target, context, size)
    pairs = [(_clocked(target, rows, size), _clocked(target, rows, 1)) for _ in range(PAIRS + WARM_PASSES)]
    many, one = zip(*pairs[WARM_PASSES:], strict=True)
    return paired_ratio(many, one)


def _filled(target: TargetModel, context: int, size: int) -> SequenceCache:
    """`context` KV slots of one sequence, with room for `size` more."""
    rows = target.new_cache(context + size)
    target.forward(rows, [0])
    rows.fill_blank(context)
    return rows


def _clocked(target: TargetModel, rows: SequenceCache, size: int) -> float:
    synchronize(target.device)
    started = time.perf_counter()
    target.forward(rows, [0], [0] * (size - 1), range(-1, size - 2)).argmax(-1).tolist()
    return time.perf_counter() - started


@torch.inference_mode()
def waits(target: TargetModel, sampling: SamplingParams) -> int | None:
    """How often the host waits for the device in a step that draws 8 tokens; None if the device is no GPU."""
    if target.device.type != "cuda":
        return None

    def step() -> None:
        rows, sampler = target.new_cache(64), Sampler(sampling, target.vocab_size, [0], target.device)
        sampler.begin(target.forward(rows, [0], [0] * 7, range(-1, 6)), [0] * 7, range(-1, 6))
        for row in range(8):
            sampler.observe(sampler.choose(row))

    step()  # the first call includes one-time setup
    return count_host_syncs(step)


@torch.inference_mode()
def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy within device memory, the best of a few copies."""
    source = torch.empty(copied_bytes(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(PASSES):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - started)
    del source, target
    gc.collect()
    return 2 * copied_bytes(device) / min(times)
