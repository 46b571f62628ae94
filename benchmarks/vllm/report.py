"""What the benchmark found: answers compared, recorded calls timed, and what failed or was left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from agentspec.benchmarks import report
from agentspec.benchmarks.report import MIN_PAIRS, Ratio, paired_ratio
from agentspec.benchmarks.vllm.shapes import OFF

NGRAM_GPU = "ngram_gpu"
BASELINES = (OFF, NGRAM_GPU)
ALL = "all"


@dataclass(frozen=True, slots=True)
class ForcedRun:
    """One forced answer of one engine: seconds of the whole call and after its first token, and the steps after it."""

    seconds: float
    decode: float
    steps: int
    equal: bool  # to the script


@dataclass(slots=True)
class ForcedCall:
    """One recorded call, with the tokens of its prompt and answer, and the run of each engine."""

    file: str
    prompt: int
    answer: int
    runs: dict[str, ForcedRun] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnswerTurn:
    """The greedy answers to several prompts: the steps that all took, and how many equal those without drafts."""

    steps: int
    same: int
    answers: int

    def __str__(self) -> str:
        return f"{self.steps}, {self.same} of {self.answers}"


@dataclass(slots=True)
class ForcedReport:
    """The results. Names of engines are keys.

    `failed` tells why an engine did not start or stopped answering, by part and name; its runs are in no figure.
    """

    shape: str
    device: str
    checks: dict[str, bool] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[str, dict[str, AnswerTurn]] = field(default_factory=dict)
    calls: list[ForcedCall] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether an engine without drafts ran, and all answers are what they have to be."""
        return bool(self.checks) and all(self.checks.values())

    @property
    def names(self) -> list[str]:
        """The engines that ran to the end, in the order in which they were given."""
        found = {name: None for call in self.calls for name in call.runs}
        return [name for name in found if all(name in call.runs for call in self.calls)]

    def ratio(self, name: str, baseline: str, calls: Sequence[ForcedCall], part: str) -> Ratio | None:
        """How many times as fast as the baseline, over calls of at least two tokens. `part` is seconds or decode."""
        pairs = [(call.runs[baseline], call.runs[name]) for call in calls if call.answer > 1]
        if name == baseline or len(pairs) < MIN_PAIRS:
            return None
        return paired_ratio(*zip(*((getattr(a, part), getattr(b, part)) for a, b in pairs), strict=True))

    def show(self) -> Iterator[RenderableType]:
        yield f"{self.shape}, random weights, vLLM on {self.device}: {self.seconds:.0f} s"
        yield from (f"  {'ok' if holds else 'FAILED'}: {name}" for name, holds in self.checks.items())
        if self.answers:
            yield self._answer_table()
        yield from (self._call_table(file, calls) for file, calls in self._files().items())
        yield from (Text(f"  did not run: {name}: {reason}") for name, reason in self.failed.items())
        yield from (f"  left out: {name}" for name in self.left_out)

    def _files(self) -> dict[str, list[ForcedCall]]:
        """The calls of each file, and of all if there are several."""
        files: dict[str, list[ForcedCall]] = {}
        for call in self.calls:
            files.setdefault(call.file, []).append(call)
        return {**files, ALL: self.calls} if len(files) > 1 else files

    def _answer_table(self) -> RenderableType:
        turns = list(next(iter(self.answers.values())))
        rows = ((name, *(str(found[turn]) for turn in turns)) for name, found in self.answers.items())
        return report.table(f"steps, and answers that equal those of {OFF}", ("drafter", *turns), rows)

    def _call_table(self, file: str, calls: Sequence[ForcedCall]) -> RenderableType:
        bases = [base for base in BASELINES if base in self.names]
        ratios = [heading for base in bases for heading in (f"/ {base}", "after 1st token")]
        rows = ((name, *self._speeds(name, calls), *self._ratios(name, bases, calls)) for name in self.names)
        title = f"{file}: {len(calls)} calls, forced, a whole call and after its first token"
        return report.table(title, ("drafter", "tok/s", "tokens/step", "ms/step", *ratios), rows)

    def _speeds(self, name: str, calls: Sequence[ForcedCall]) -> Iterator[str]:
        """Tokens a second, tokens a step (the first token of each call in a step of its own), milliseconds a step."""
        runs, tokens = [call.runs[name] for call in calls], sum(call.answer for call in calls)
        steps = sum(run.steps for run in runs)
        yield f"{tokens / sum(run.seconds for run in runs):.0f}"
        yield f"{tokens / (steps + len(runs)):.2f}"
        yield f"{sum(run.decode for run in runs) / steps * 1e3:.2f}" if steps else "-"

    def _ratios(self, name: str, bases: Sequence[str], calls: Sequence[ForcedCall]) -> Iterator[str]:
        for base in bases:
            for part in ("seconds", "decode"):
                yield str(self.ratio(name, base, calls, part) or "-")

    def data(self) -> dict[str, Any]:
        return asdict(self)
