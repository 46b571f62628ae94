"""Times recorded calls on vLLM engines with several drafters, side by side on one device, without model files.

Each engine is a process with random weights. Answers of small models are compared first. Then the caches learn some
calls, and the answers of others are forced token by token: the model does all of its work, but what it says is the
record. The engines take turns call by call, in rotating order, and none works while another does.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from agentspec.benchmarks.gpu.random_model import CONTEXT
from agentspec.benchmarks.report import Progress, rotated
from agentspec.benchmarks.traces import load_encoder, read_calls
from agentspec.benchmarks.vllm.engine import FIXED, EngineAnswer, EngineFailedError, EngineProcess, started
from agentspec.benchmarks.vllm.report import AnswerTurn, ForcedCall, ForcedReport, ForcedRun
from agentspec.benchmarks.vllm.shapes import (
    GIB,
    OFF,
    VARIANTS,
    WORDS,
    Variant,
    answering_model,
    engine_options,
    scripted_model,
)
from agentspec.errors import ConfigurationError, install_advice
from agentspec.recordings.replay import EncodedCall

WORKER = "agentspec.benchmarks.vllm.worker"
SHORT = 2048  # tokens of the longest text of the comparison of answers
ROOM = {"cpu": GIB, "cuda": 3 * GIB}  # bytes of KV slots for the calls; of several at once four times as many
ENDING = 64  # last tokens of a prompt, which stay together where it is lengthened
LACKING = """\
import sys
from importlib.util import find_spec
names = [name for name in ("vllm", "agentspec") if find_spec(name) is None]
if not names and find_spec("agentspec.benchmarks.vllm") is None: names = ["agentspec of this version"]
sys.exit(f"has no {' and no '.join(names)}" if names else 0)
"""

Engines = dict[str, EngineProcess]


class ForcedPart(StrEnum):
    answers = "answers"
    calls = "calls"


@dataclass(frozen=True, slots=True)
class ForcedPlan:
    """What to compare, and the most seconds to spend: no call begins after `seconds`. `traces` need a `tokenizer`.

    `start` bounds the seconds until all engines of a part are ready, `patience` those of one command. So many calls
    run `together`.
    """

    python: Path
    device: str = "cuda"
    shape: str = "3b"
    variants: Sequence[str] = ()
    parts: Sequence[ForcedPart] = tuple(ForcedPart)
    traces: Sequence[Path] = ()
    tokenizer: Path | None = None
    learned: int = 0
    seconds: float = 570.0
    start: float = 300.0
    patience: float = 120.0
    together: int = 1
    worker: Sequence[str] = ("-m", WORKER)

    def chosen(self) -> list[Variant]:
        """The variants to compare, with the one without drafts first. Raises `ConfigurationError` for other names."""
        if unknown := [name for name in self.variants if name not in VARIANTS]:
            raise ConfigurationError(f"there is no drafter {unknown[0]!r}: choose from {', '.join(VARIANTS)}")
        names = dict.fromkeys([OFF, *(self.variants or VARIANTS)])
        return [VARIANTS[name] for name in names]


def run_forced(plan: ForcedPlan, progress: Progress = lambda message: None) -> ForcedReport:
    """Run the plan. Raises `ConfigurationError` for a file, a drafter or an interpreter that cannot be used."""
    return ForcedBench(plan, progress).run()


def require_vllm(python: Path) -> None:
    """Raise `ConfigurationError` unless the interpreter has vLLM and this benchmark."""
    command = [str(python), "-P", "-c", LACKING]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except subprocess.CalledProcessError as error:
        told = error.stderr.strip().splitlines()[-1:]
        raise ConfigurationError(
            f"{python} {' '.join(told)}: make an environment by .ci/vllm-env, or there, {install_advice('vllm')}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{python} cannot be run: {error}") from error


PROMPTS, ALONE = 16, 4
TOKENS = 128
REPEATED = 20  # first tokens of a prompt that its second turn ends with
SPREAD, FOLLOW = 0.03, 0.05  # of the weights: answers are varied and repeat themselves
FIRST, AGAIN, BY_ONE, SECOND = "first time", "again", "one at a time", "second turn"

Prompts = Sequence[Sequence[int]]


def prompts() -> list[list[int]]:
    """Prompts that repeat a passage and begin it a third time; they differ in its length."""
    rng, made = np.random.default_rng(0), []
    for number in range(PROMPTS):
        passage, other = (rng.integers(10, WORDS, count).tolist() for count in (12 + number, 8))
        made.append([*passage, *other, *passage, *other[:4], *passage[: 5 + number % 6]])
    return made


class GreedyComparison:
    """The engine without drafts is asked first: its answers are to be equalled, and second turns go on from them."""

    def __init__(self, seconds: float) -> None:
        """`seconds` bound the wait for any answer."""
        self._seconds = seconds
        self._plain: dict[str, list[list[int]]] = {}

    def run(self, engine: EngineProcess) -> dict[str, AnswerTurn]:
        """Ask one engine all turns. Raises `EngineFailedError`."""
        engine.call("bench_draw_weights", SPREAD, FOLLOW, seconds=self._seconds)
        first = prompts()
        return {
            FIRST: self._compared(FIRST, [self._ask(engine, first)]),
            AGAIN: self._compared(AGAIN, [self._ask(engine, first)]),
            BY_ONE: self._compared(BY_ONE, [self._ask(engine, [prompt]) for prompt in first[:ALONE]]),
            SECOND: self._compared(SECOND, [self._ask(engine, self._second(first))]),
        }

    def _ask(self, engine: EngineProcess, asked: Prompts) -> EngineAnswer:
        count = len(asked)
        return engine.generate(asked, [TOKENS] * count, seconds=self._seconds, sessions=[""] * count)

    def _second(self, first: list[list[int]]) -> list[list[int]]:
        said = self._plain[FIRST]
        return [[*prompt, *answer, *prompt[:REPEATED]] for prompt, answer in zip(first, said, strict=True)]

    def _compared(self, turn: str, found: Sequence[EngineAnswer]) -> AnswerTurn:
        tokens = [answer for part in found for answer in part.tokens]
        plain = self._plain.setdefault(turn, tokens)
        same = sum(one == other for one, other in zip(tokens, plain, strict=True))
        return AnswerTurn(sum(len(part.steps) for part in found), same, len(tokens))


class ForcedBench:
    """Runs a plan part by part."""

    def __init__(self, plan: ForcedPlan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._variants = plan.chosen()
        if ForcedPart.calls in plan.parts and not (plan.traces and plan.tokenizer):
            raise ConfigurationError("the part calls needs recorded calls and a tokenizer")
        require_vllm(plan.python)
        self._began = time.monotonic()
        self._report = ForcedReport(plan.shape, plan.device)

    def run(self) -> ForcedReport:
        prepared = self._prepared()
        with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder:
            if ForcedPart.answers in self._plan.parts and self._in_time(ForcedPart.answers):
                self._compare_answers(Path(folder))
            if prepared is not None and self._in_time(ForcedPart.calls):
                self._time_calls(Path(folder), prepared)
        self._report.seconds = time.monotonic() - self._began
        return self._report

    def _prepared(self) -> PreparedCalls | None:
        if ForcedPart.calls not in self._plan.parts or self._plan.tokenizer is None:
            return None
        self._progress("reading calls")
        return prepare_calls(self._plan.traces, self._plan.tokenizer, self._plan.learned, self._plan.together)

    @property
    def _late(self) -> bool:
        return time.monotonic() - self._began > self._plan.seconds

    def _in_time(self, part: ForcedPart) -> bool:
        if late := self._late:
            self._report.left_out.append(part)
        return not late

    def _compare_answers(self, folder: Path) -> None:
        model = answering_model(folder / "small", self._plan.device)
        comparison = GreedyComparison(self._plan.patience)

        def compare(engine: EngineProcess) -> None:
            if engine.name == OFF or OFF in self._report.answers:
                self._progress(f"answers: {engine.name}")
                self._note(engine.name, comparison.run(engine))

        with ExitStack() as stack:
            engines = self._start(stack, ForcedPart.answers, folder, model, length=SHORT)
            self._each(engines, ForcedPart.answers, 0, compare)
        self._report.checks[f"{ForcedPart.answers}: the engine without drafts answered"] = OFF in self._report.answers

    def _note(self, name: str, found: dict[str, AnswerTurn]) -> None:
        self._report.answers[name] = found
        for turn, answers in found.items():
            self._report.checks[f"{name}: answers equal those of {OFF}, {turn}"] = answers.same == answers.answers

    def _time_calls(self, folder: Path, prepared: PreparedCalls) -> None:
        model = scripted_model(folder / "scripted", self._plan.shape, prepared.vocabulary)
        learned = prepared.write_learned(folder / "learned.jsonl.gz")
        with ExitStack() as stack:
            room = ROOM[self._plan.device] * (4 if self._plan.together > 1 else 1)
            engines = self._start(stack, ForcedPart.calls, folder, model, room=room, together=self._plan.together)
            self._each(engines, ForcedPart.calls, 0, lambda engine: self._learn(engine, learned))
            self._replay(engines, prepared.timed)
            self._report.checks[f"{ForcedPart.calls}: the engine without drafts answered"] = OFF in engines

    def _start(self, stack: ExitStack, part: ForcedPart, folder: Path, model: Path, **sizes: int) -> Engines:
        """Start an engine for each variant, and note those that do not start."""
        self._progress(f"{part}: starting {len(self._variants)} engines")
        failed: dict[str, str] = {}
        engines = [self._engine(variant, part, folder, model, **sizes) for variant in self._variants]
        ready = stack.enter_context(started(engines, self._plan.start, failed))
        self._report.failed |= {f"{name}, {part}": reason for name, reason in failed.items()}
        self._report.engines |= {engine.name: engine.info for engine in ready}
        self._report.device = next((str(e.info["device"]) for e in ready if "device" in e.info), self._report.device)
        return {engine.name: engine for engine in ready}

    def _engine(self, variant: Variant, part: ForcedPart, folder: Path, model: Path, **sizes: int) -> EngineProcess:
        kind = self._plan.device
        options = engine_options(model, kind, variant, **sizes)
        common = FIXED if kind == "cpu" else {"VLLM_NO_USAGE_STATS": "1"}
        return EngineProcess(
            variant.drafter,
            [str(self._plan.python), *self._plan.worker, options],
            folder / f"{part}-{variant.drafter.replace(' ', '-')}.log",
            # Without the last, the processes of vLLM would take the current folder's agentspec.
            {**common, **variant.variables, "PYTHONSAFEPATH": "1"},
        )

    def _each(self, engines: Engines, part: ForcedPart, turn: int, act: Callable[[EngineProcess], None]) -> None:
        """Let the engines act one after another, in an order that rotates with `turn`; drop those that fail."""
        for name, engine in rotated(engines, turn) if engines else ():
            try:
                act(engine)
            except EngineFailedError as error:
                self._report.failed[f"{name}, {part}"] = str(error)
                del engines[name]

    def _learn(self, engine: EngineProcess, learned: Path) -> None:
        if VARIANTS[engine.name].cached:
            self._progress(f"{engine.name} learns")
            engine.call("bench_learn", str(learned), seconds=self._plan.patience)

    def _replay(self, engines: Engines, timed: Sequence[TimedCalls]) -> None:
        """Time the calls, with an order of the engines that rotates within each file."""
        turns: Counter[str] = Counter()
        for number, named in enumerate(timed):
            if self._late or not engines:
                self._report.left_out.append(f"{len(timed) - number} of {len(timed)} calls")
                return
            self._progress(f"call {number + 1} of {len(timed)}: {named.file}")
            self._report.calls.append(self._force(engines, named.file, named.calls, turns[named.file]))
            turns[named.file] += 1

    def _force(self, engines: Engines, file: str, calls: Sequence[EncodedCall], turn: int) -> ForcedCall:
        """Let each engine give the answers."""
        call = ForcedCall(file, sum(len(each.prompt) for each in calls), sum(len(each.response) for each in calls))

        def run(engine: EngineProcess) -> None:
            call.runs[engine.name] = found = self._forced(engine, calls)
            name = f"{engine.name}: forced answers are the records"
            self._report.checks[name] = found.equal and self._report.checks.get(name, True)

        self._each(engines, ForcedPart.calls, turn, run)
        return call

    def _forced(self, engine: EngineProcess, calls: Sequence[EncodedCall]) -> ForcedRun:
        patience, answers = self._plan.patience, [call.response.tolist() for call in calls]
        prompts, lengths = lengthened(calls), list(map(len, answers))
        script = [0] * (CONTEXT + 1)
        for prompt, answer in zip(prompts, answers, strict=True):
            script[len(prompt) : len(prompt) + len(answer)] = answer
        engine.call("bench_script", script, seconds=patience)
        found = engine.generate(prompts, lengths, seconds=patience, sessions=[call.session for call in calls])
        steps = found.steps_after(len(prompts[0])) if len(calls) == 1 else len(found.steps)
        return ForcedRun(found.seconds, max(found.decode), steps, found.tokens == answers)


def lengthened(calls: Sequence[EncodedCall]) -> list[list[int]]:
    """The prompts of calls that run together, lengthened so that no two answers have a position in common: the script
    goes by positions. What is added stands before the last `ENDING` tokens.
    """
    prompts, free = dict[int, list[int]](), 0
    for number in sorted(range(len(calls)), key=lambda number: len(calls[number].prompt)):
        prompt = calls[number].prompt.tolist()
        added = max(0, free - len(prompt))
        prompts[number] = [*prompt[:-ENDING], *[0] * added, *prompt[-ENDING:]]
        free = len(prompt) + added + len(calls[number].response)
    return [prompts[number] for number in range(len(calls))]


@dataclass(frozen=True, slots=True)
class TimedCalls:
    """Calls that run together, and the name of their file."""

    file: str
    calls: Sequence[EncodedCall]


@dataclass(frozen=True, slots=True)
class PreparedCalls:
    """What is learned, what is timed, file by file in turn, and the least vocabulary that holds all tokens."""

    learned: Sequence[EncodedCall]
    timed: Sequence[TimedCalls]
    vocabulary: int

    def write_learned(self, path: Path) -> Path:
        """Write what is learned as lines of {"session", "prompt", "response"}, compressed."""
        with gzip.open(path, "wt") as lines:
            for call in self.learned:
                kept = {"session": call.session, "prompt": call.prompt.tolist(), "response": call.response.tolist()}
                lines.write(json.dumps(kept) + "\n")
        return path


def prepare_calls(traces: Sequence[Path], tokenizer: Path, learned: int, together: int = 1) -> PreparedCalls:
    """The calls of all files that fit the model; the first `learned` of each file, at most half, are learned.
    Of several at once, those that do not fill a batch are left out.

    Raises `ConfigurationError` for a file that cannot be used, and if no call fits.
    """
    encode = load_encoder(tokenizer)
    longest = CONTEXT if together == 1 else CONTEXT // 2  # the other half is for what lengthens prompts
    files = {path: [call for call in read_calls(path, encode) if _fits(call, longest)] for path in traces}
    count = {path: min(learned, len(calls) // 2) for path, calls in files.items()}
    named = (
        [TimedCalls(_name(path), part) for part in _batches(calls[count[path] :], together)]
        for path, calls in files.items()
    )
    timed = [call for turn in zip_longest(*named) for call in turn if call is not None]
    if not timed:
        raise ConfigurationError(
            f"there are no {together} recorded calls of fewer than {longest} tokens with their answers"
        )
    tokens = chain.from_iterable((call.prompt, call.response) for calls in files.values() for call in calls)
    vocabulary = 1 + max(int(part.max()) for part in tokens if len(part))
    return PreparedCalls([call for path in traces for call in files[path][: count[path]]], timed, vocabulary)


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def _fits(call: EncodedCall, longest: int) -> bool:
    """Whether prompt and answer fit, and there is a prompt, from which vLLM starts."""
    return 0 < len(call.prompt) < longest - len(call.response)


def _batches(calls: Sequence[EncodedCall], together: int) -> Iterator[Sequence[EncodedCall]]:
    """As many calls as run together at a time, whose answers have room one behind another."""
    batch: list[EncodedCall] = []
    for call in calls:
        if together == 1 or sum(len(each.response) for each in [*batch, call]) < CONTEXT // 2:
            batch.append(call)
        if len(batch) == together:
            yield batch
            batch = []
