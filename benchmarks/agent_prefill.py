"""An agent's next turn with and without reading ahead: the time to its first token while tools run for some time.

A session asks, answers, waits for its tool, and asks again. The history is scripted (`agent_workflows`), so that both
variants see the same prompts; they alternate, each with a tenant of its own. With reading ahead, what is known of the
next prompt is asked for when the tool starts. The answers must be the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize
from rich.console import RenderableType

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks import report
from agentspec.benchmarks.agent_workflows import Workflow, measured_workflows
from agentspec.benchmarks.report import MIN_PAIRS, Progress, Ratio, paired_ratio
from agentspec.types import GenerateRequest, Message, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

TOOL_SECONDS = (1.0,)
KV_BYTES = 256 << 20
STANDSTILL = 0.5  # seconds in which a process that computes gets some processor time
EXTENDS, REWRITTEN, NODE, EVICTED = "extends", "rewritten", "another node", "evicted"
CASES = {
    EXTENDS: "the answer is sent back as the model wrote it",
    REWRITTEN: "another text than the model's is sent back, as where thoughts are left out",
    NODE: "the next prompt begins with the instructions of another node",
    EVICTED: "other answers need the memory of the session's slots while the tool runs",
}
GOALS = {EXTENDS: 0.98, REWRITTEN: 1.5, NODE: 1.5, EVICTED: 1.5}
BUSY = 0.98  # goal for the throughput
AT_ONCE = 4  # sessions without tools' time, for the throughput
FIRST, NEXT = SamplingParams(temperature=0, max_tokens=16), SamplingParams(temperature=0, max_tokens=4)
OTHER_TOKENS = 512
OTHERS = SamplingParams(temperature=0, max_tokens=OTHER_TOKENS)
RESULT = "$ python -m pytest -q\n{} passed in 0.41s\nNext: say in a sentence what has changed."
RULES = "{}. Report every doubt about a line with its number, the reason, and the shortest change that removes it."
REVIEWER = "You review changes. " + " ".join(RULES.format(f"Rule {number}") for number in range(1, 13))


@dataclass(frozen=True, slots=True)
class NextTurn:
    """One next turn: seconds to its first token, by the clock and of this process on the processor, tokens that were
    computed for it then, and its answer.
    """

    seconds: float
    processor: float
    computed: int
    answer: tuple[int, ...]


@dataclass(slots=True)
class TurnPairs:
    """The next turns of one case after tools of the same length, without and with reading ahead."""

    case: str
    tool_seconds: float
    off: list[NextTurn] = field(default_factory=list)
    on: list[NextTurn] = field(default_factory=list)

    @property
    def ratio(self) -> Ratio:
        """How many times sooner the first token comes."""
        return paired_ratio([turn.seconds for turn in self.off], [turn.seconds for turn in self.on])

    @property
    def processor_ratio(self) -> Ratio:
        """How many times less time on the processor passes until then."""
        return paired_ratio([turn.processor for turn in self.off], [turn.processor for turn in self.on])

    @property
    def identical(self) -> int:
        return sum(off.answer == on.answer for off, on in zip(self.off, self.on, strict=True))


@dataclass(slots=True)
class AgentPrefillReport:
    """All pairs, and the seconds of busy rounds without and with reading ahead, by the clock and on the processor."""

    pairs: list[TurnPairs] = field(default_factory=list)
    busy: dict[str, list[float]] = field(default_factory=lambda: {"off": [], "on": []})
    busy_processor: dict[str, list[float]] = field(default_factory=lambda: {"off": [], "on": []})

    def show(self) -> Iterator[RenderableType]:
        columns = ("case", "tool s", "tokens off", "on", "first token off", "on", "sooner", "goal", "verdict", "same")
        for title, processor in (("by the clock", False), ("on the processor", True)):
            rows = (self._row(one, processor) for one in self.pairs)
            yield report.table(f"Time to the first token of the next turn, {title}", columns, rows)
        yield "".join(f"  {name}: {meaning}\n" for name, meaning in CASES.items()).rstrip()
        yield f"  {AT_ONCE} sessions at once, tools that take no time: {self._throughput()}"

    @property
    def throughput(self) -> Ratio:
        """How many times the throughput is, by the clock, when next turns are read ahead."""
        return paired_ratio(self.busy["off"], self.busy["on"])

    @property
    def processor_throughput(self) -> Ratio:
        """The same for each second on the processor."""
        return paired_ratio(self.busy_processor["off"], self.busy_processor["on"])

    def data(self) -> dict[str, Any]:
        return {
            "pairs": [asdict(one) for one in self.pairs],
            "busy": self.busy,
            "busy_processor": self.busy_processor,
        }

    def _throughput(self) -> str:
        ratios = (self.throughput, "by the clock"), (self.processor_throughput, "on the processor")
        return ", ".join(f"{ratio} the throughput {how} ({ratio.verdict(BUSY)})" for ratio, how in ratios) + (
            f", goal {BUSY}x"
        )

    def _row(self, one: TurnPairs, processor: bool) -> Sequence[str]:
        sides = (one.off, one.on)
        tokens = (f"{median(turn.computed for turn in side):.0f}" for side in sides)
        taken = ([turn.processor if processor else turn.seconds for turn in side] for side in sides)
        seconds = (f"{1000 * median(side):.0f} ms" for side in taken)
        goal, ratio = GOALS[one.case], one.processor_ratio if processor else one.ratio
        ends = (str(ratio), f"{goal}x", ratio.verdict(goal), f"{one.identical}/{len(one.off)}")
        return one.case, f"{one.tool_seconds:g}", *tokens, *seconds, *ends


def run_agent_prefill(
    model: str,
    tool_seconds: Sequence[float] = TOOL_SECONDS,
    rounds: int = MIN_PAIRS,
    processor_time: bool = False,
    *,
    cases: Sequence[str] = tuple(CASES),
    progress: Progress,
) -> AgentPrefillReport:
    """Measure all cases, each with `rounds` pairs, of which there are 7 or more. Raises what the backend raises."""
    from agentspec.backends.torch import TorchBackend

    progress(f"loading {model}")
    backend = TorchBackend.load(TorchSettings(model=model, kv_bytes=ByteSize(KV_BYTES), prefill_next_turn=False))
    clock = time.process_time if processor_time else time.perf_counter
    bench = AgentPrefillBench(backend, progress, rounds=rounds, clock=clock)
    return asyncio.run(bench.measure(tool_seconds, cases))


@dataclass(slots=True)
class AgentPrefillBench:
    """Sessions on one loaded model, which is closed at the end."""

    backend: TorchBackend
    progress: Progress
    rounds: int = MIN_PAIRS
    workflows: list[Workflow] = field(default_factory=lambda: measured_workflows(MIN_PAIRS))
    clock: Callable[[], float] = time.perf_counter

    async def measure(self, tool_seconds: Sequence[float], cases: Sequence[str]) -> AgentPrefillReport:
        try:
            await self._ask(self._started(0), "warm-up", NEXT)
            found = AgentPrefillReport()
            for case in cases:
                found.pairs += [await self._pairs(case, seconds) for seconds in tool_seconds]
            for number in range(self.rounds):
                await self._busy(found, number)
            return found
        finally:
            await self.backend.aclose()

    async def _pairs(self, case: str, tool_seconds: float) -> TurnPairs:
        pairs = TurnPairs(case, tool_seconds)
        for number in range(self.rounds):
            self.progress(f"{case}, tools of {tool_seconds:g} s: session {number + 1} of {self.rounds}")
            sides = report.rotated({"off": pairs.off, "on": pairs.on}, number)
            for side, turns in sides:
                tenant = f"{case}/{tool_seconds}/{number}/{side}"
                turns.append(await self._session(case, tool_seconds, number, tenant, ahead=side == "on"))
        return pairs

    async def _session(self, case: str, tool_seconds: float, number: int, tenant: str, *, ahead: bool) -> NextTurn:
        """One turn, the tool, and the next turn, which is timed."""
        first = await self._ask(self._started(number), tenant, FIRST)
        known = self._known(case, number, self.backend.decode(first.answer))
        ends = self.clock() + tool_seconds
        if ahead:
            await self.backend.prefill(_request(known, tenant, FIRST))
        if case == EVICTED:
            await self._others()
        await self._until(ends)
        return await self._ask([*known, self._unknown(case, number)], tenant, NEXT)

    async def _until(self, ends: float) -> None:
        """Wait like a tool. Processor time stands still once nothing is read: the rest then changes nothing."""
        while (left := ends - (before := self.clock())) > 0.0:
            await asyncio.sleep(max(left, STANDSTILL) if self.clock is time.process_time else left)
            if self.clock() - before < 0.02 * STANDSTILL:
                return

    async def _ask(self, messages: Sequence[Message], tenant: str, sampling: SamplingParams) -> NextTurn:
        began, first = _clocks(), (0.0, 0.0)
        tokens: list[int] = []
        computed = 0
        async for delta in self.backend.generate(_request(messages, tenant, sampling)):
            first = first if tokens else _since(began)
            tokens += delta.token_ids
            if delta.usage is not None:
                computed = delta.usage.prompt_tokens - delta.usage.cached_tokens
        return NextTurn(*first, computed, tuple(tokens))

    async def _others(self) -> None:
        """Answers of other tenants that together reserve all slots, and are given up after their first token."""
        count = (self.backend.stats().kv_rows_limit or 0) // OTHER_TOKENS + 1
        await asyncio.gather(*(self._begin(f"other {number}") for number in range(count)))

    async def _begin(self, tenant: str) -> None:
        request = _request([{"role": "user", "content": "Count."}], tenant, OTHERS)
        async with aclosing(self.backend.generate(request)) as deltas:  # type: ignore[type-var]
            async for _ in deltas:
                return

    async def _busy(self, found: AgentPrefillReport, round: int) -> None:
        """A round of sessions at once whose tools take no time, without and with reading ahead."""
        for side, seconds in report.rotated(found.busy, round):
            self.progress(f"throughput: round {round + 1} of {self.rounds}, {side}")
            began = _clocks()
            tenants = [f"busy/{round}/{number}/{side}" for number in range(AT_ONCE)]
            sessions = (self._hurried(number, tenant, side == "on") for number, tenant in enumerate(tenants))
            await asyncio.gather(*sessions)
            taken, processor = _since(began)
            seconds.append(taken)
            found.busy_processor[side].append(processor)

    async def _hurried(self, number: int, tenant: str, ahead: bool) -> None:
        await self._ask(self._started(number), tenant, FIRST)
        known = self._known(REWRITTEN, number, "")
        if ahead:
            await self.backend.prefill(_request(known, tenant, FIRST))
        await self._ask([*known, self._unknown(REWRITTEN, number)], tenant, FIRST)

    def _started(self, number: int) -> list[Message]:
        return self.workflows[number % len(self.workflows)].messages(0)

    def _known(self, case: str, number: int, said: str) -> list[Message]:
        """What is known of the next prompt when the first answer has `said` something."""
        if case == NODE:
            return [{"role": "system", "content": REVIEWER}]
        sent = said if case in (EXTENDS, EVICTED) else self.workflows[number % len(self.workflows)].turns[0].answer
        return [*self._started(number), {"role": "assistant", "content": sent}]

    def _unknown(self, case: str, number: int) -> Message:
        answer = self.workflows[number % len(self.workflows)].turns[0].answer.splitlines()[1]
        return {"role": "user", "content": f"Review: {answer}" if case == NODE else RESULT.format(number + 5)}


def _clocks() -> tuple[float, float]:
    """Seconds by the clock, and of this process on the processor."""
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    now, processor = _clocks()
    return now - began[0], processor - began[1]


def _request(messages: Sequence[Message], tenant: str, sampling: SamplingParams) -> GenerateRequest:
    return GenerateRequest("", messages=messages, tenant=tenant, sampling=sampling, speculation=False)
