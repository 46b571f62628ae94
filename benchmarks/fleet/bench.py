"""How near the simulation comes to real servers: costs measured while all are busy, then sessions, several times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from rich.console import RenderableType

from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings
from agentspec.benchmarks import report
from agentspec.benchmarks.fleet.replay import LiveSessions
from agentspec.benchmarks.fleet.sessions import rate_for, simulated, small_sessions
from agentspec.benchmarks.report import Progress
from agentspec.errors import ConfigurationError
from agentspec.simulation.calibrate import fit, measure
from agentspec.simulation.costs import EngineCosts
from agentspec.simulation.scenario import Scenario

GOALS = {50: 0.20, 95: 0.30}  # the most that a percentile of the simulated sessions may be off

NO_BLOCKS = 1 << 20  # tokens of a block: no prompt has one, since the sessions share no prefix
LOCAL = EngineCosts(max_batched_tokens=256, max_running=16, kv_tokens=60_000, block_tokens=1)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is measured: `words` of the longest prompt that is timed, `sessions` in each run, `load` as a share of what
    `least_loaded` sustains by the simulation.
    """

    model: str
    policy: str = "workflow"
    load: float = 0.8
    sessions: int = 60
    runs: int = 5
    words: int = 64
    rounds: int = 1
    seed: int = 0


@dataclass(slots=True)
class FleetReport:
    """Seconds of all sessions in each run, real and simulated."""

    plan: FleetPlan
    costs: EngineCosts
    rate: float
    real: list[list[float]] = field(default_factory=list)
    simulated: list[list[float]] = field(default_factory=list)

    def ratio(self, percentile: int) -> float:
        """Simulated by real, the median of the runs."""
        return median(self._ratios(percentile))

    def _ratios(self, percentile: int) -> list[float]:
        pairs = zip(self.simulated, self.real, strict=True)
        return [float(np.percentile(one, percentile) / np.percentile(other, percentile)) for one, other in pairs]

    def show(self) -> Iterator[RenderableType]:
        plan = self.plan
        yield (
            f"{plan.runs} runs of {plan.sessions} sessions, {self.rate:.3f} a second ({plan.load:g} of what"
            f" least_loaded sustains), placed by {plan.policy}; costs:"
            f" step {self.costs.step:.4g} s, sequence {self.costs.sequence:.4g} s,"
            f" context token {self.costs.context_token:.4g} s, prompt token {self.costs.prompt_token:.4g} s"
        )
        columns = ("figure", "real", "simulated", "simulated / real", "of the runs", "verdict")
        yield report.table("Seconds of a session, medians of the runs", columns, map(self._row, GOALS))

    def _row(self, percentile: int) -> Sequence[str]:
        real, made = (_median_of(runs, percentile) for runs in (self.real, self.simulated))
        ratios = self._ratios(percentile)
        met = abs(self.ratio(percentile) - 1) <= GOALS[percentile]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        return (
            f"p{percentile}",
            f"{real:.2f}",
            f"{made:.2f}",
            f"{self.ratio(percentile):.2f}",
            spread,
            "met" if met else "missed",
        )

    def data(self) -> dict[str, Any]:
        return {
            "plan": {name: getattr(self.plan, name) for name in self.plan.__slots__},
            "costs": self.costs.model_dump(),
            "rate": self.rate,
            "real": self.real,
            "simulated": self.simulated,
        }


def run_fleet(plan: FleetPlan, urls: Sequence[str], base: EngineCosts, *, progress: Progress) -> FleetReport:
    """Calibrate the servers at `urls` while all are busy, then play them sessions and simulate the same ones."""
    return asyncio.run(_run(plan, urls, base, progress))


def _median_of(runs: Sequence[Sequence[float]], percentile: int) -> float:
    return median(float(np.percentile(run, percentile)) for run in runs)


async def _run(plan: FleetPlan, urls: Sequence[str], base: EngineCosts, progress: Progress) -> FleetReport:
    async with _backends(urls) as servers:
        costs = await _calibrated(plan, list(servers.values()), base, progress)
        shapes = small_sessions(plan.seed)
        found = FleetReport(plan, costs, rate=1.0)
        found.rate = rate_for(plan.load, _scenario(found, len(urls), 0), shapes)
        for run in range(plan.runs):
            progress(f"run {run + 1} of {plan.runs}")
            drawn = simulated(_scenario(found, len(urls), run), shapes)
            asked = {name: server.generate for name, server in servers.items()}
            replay = LiveSessions(asked, plan.model, plan.policy, plan.seed + run)
            found.real.append(await replay.seconds(drawn))
            found.simulated.append([session.simulated for session in drawn])
        return found


def _scenario(found: FleetReport, engines: int, run: int) -> Scenario:
    """What is simulated in this run, with the costs and the rate that were found before."""
    plan = found.plan
    return Scenario(
        policy=plan.policy,
        engines=engines,
        sessions=plan.sessions,
        rate=found.rate,
        costs=found.costs,
        seed=plan.seed + run,
        block_tokens=NO_BLOCKS,
    )


async def _calibrated(
    plan: FleetPlan, servers: Sequence[OpenAIBackend], base: EngineCosts, progress: Progress
) -> EngineCosts:
    """One set of costs for all, from times taken while each of them works."""
    progress(f"timing {len(servers)} servers at once")
    measured = (measure(one.generate, plan.model, base, words=plan.words, rounds=plan.rounds) for one in servers)
    return fit([time for times in await asyncio.gather(*measured) for time in times], base)


@asynccontextmanager
async def _backends(urls: Sequence[str]) -> AsyncIterator[dict[str, OpenAIBackend]]:
    if len(urls) < 2:
        raise ConfigurationError("a fleet has at least two servers")
    servers = {f"engine-{place}": OpenAIBackend(_settings(url)) for place, url in enumerate(urls)}
    try:
        yield servers
    finally:
        for server in servers.values():
            await server.aclose()


def _settings(url: str) -> OpenAISettings:
    from pydantic import ValidationError

    try:
        return OpenAISettings.model_validate({"base_url": url})
    except ValidationError:
        raise ConfigurationError(f"{url!r} is no address of a server: write it as http://host:8000/v1") from None
