"""Whole sessions of a coding agent, end to end: transformers, agentspec off, on, and on after other sessions.

Each turn's prompt is the previous prompt, an answer and the tools' output: in eight turns it grows from about 400 to
about 3900 tokens. transformers computes the whole prompt each time, as `generate` does; agentspec keeps the session's
KV slots. Each session is run under all variants in an order that rotates. All variants see the same prompts, since a
script supplies the history (`agent_workflows`). Answers are greedy, a pair is one session under two variants, and time
is wall time from prompt to last token, prefill included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.agent_workflows import Workflow, measured_workflows, other_workflows
from agentspec.benchmarks.report import Progress, RatioGoal, rotated
from agentspec.benchmarks.runs import COLD, OFF, TRANSFORMERS, EngineBench, Run, RunTable, ask, warm_name
from agentspec.types import Labels, SamplingParams

MAX_TOKENS = 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
WARM_TOGETHER = 4  # sessions that run at once while the cache is warmed

KEPT = "transformers, keeping its rows"
WARM = "on, warm"  # the tenant whose cache holds other sessions

Answerer = Callable[[Sequence[int], str], Awaitable[Run]]
"""Answers a prompt, given its token ids and the name of its session."""

PromptTokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The runs, the turns of a session in a row, and the numbers of tokens in each session's prompts.

    `warm` is the variant whose cache held other sessions.
    """

    table: RunTable
    warm: str
    prompt_tokens: PromptTokens

    @property
    def goals(self) -> tuple[RatioGoal, ...]:
        return RatioGoal(COLD, TRANSFORMERS, 3.0), RatioGoal(self.warm, TRANSFORMERS, 4.0)

    def show(self) -> Iterator[RenderableType]:
        table, sessions = self.table, len(self.prompt_tokens)
        first, last = (sum(lengths[at] for lengths in self.prompt_tokens) / sessions for at in (0, -1))
        tokens = table.tokens(TRANSFORMERS) / len(table.runs[TRANSFORMERS])
        title = f"{sessions} sessions: prompts of {first:.0f} to {last:.0f} tokens, answers of {tokens:.0f}"
        columns = ("variant", "seconds a session", f"vs {TRANSFORMERS}", "tokens/step", f"same as {TRANSFORMERS}")
        yield report.table(title, columns, (self._row(variant) for variant in table.runs))
        yield from table.goal_lines(self.goals)

    def _row(self, variant: str) -> tuple[str, ...]:
        seconds = sum(run.seconds for run in self.table.runs[variant]) / len(self.prompt_tokens)
        return (
            variant,
            f"{seconds:.1f}",
            str(self.table.ratio(variant, TRANSFORMERS)),
            self.table.steps_cell(variant),
            self.table.same(variant, TRANSFORMERS),
        )

    def data(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "ratios": self.table.ratio_data(dict.fromkeys(self.table.runs, TRANSFORMERS)),
            "goals": self.table.goal_data(self.goals),
            "runs": self.table.run_data(),
        }


def run_agent(model: str, *, turns: int, warm: int, progress: Progress, **extras: bool) -> AgentReport:
    """Measure every variant in sessions of so many `turns`, the warm one after `warm` other sessions; `extras` go to
    `AgentBench.variants`.

    Raises what the backend raises.
    """
    bench = AgentBench.load(model, progress)
    try:
        bench.warm(other_workflows(warm, turns))
        table, prompt_tokens = bench.measure(measured_workflows(turns), bench.variants(warm, **extras))
        return AgentReport(table, warm_name(warm), prompt_tokens)
    finally:
        bench.close()


class AgentBench(EngineBench):
    """Runs sessions on the model, and on the same model under transformers."""

    def warm(self, workflows: Sequence[Workflow]) -> None:
        """Fill the warm variant's cache with these sessions, some of them at once."""
        self.loop.run_until_complete(self._warm(workflows))

    async def _warm(self, workflows: Sequence[Workflow]) -> None:
        places = asyncio.Semaphore(WARM_TOGETHER)
        warm = self._agentspec(WARM)

        async def answer(number: int, workflow: Workflow) -> None:
            async with places:
                self.progress(f"warming: session {number} of {len(workflows)}")
                await self._answers(workflow, warm)

        await asyncio.gather(*(answer(number, workflow) for number, workflow in enumerate(workflows, 1)))

    def variants(self, warm: int, *, off: bool = False, kept: bool = False) -> dict[str, Answerer]:
        """The variants to compare; `off` adds agentspec without drafts, `kept` transformers that keeps its KV cache.

        The cold variant has a new tenant for each session. The warm variant's tenant also caches measured sessions.
        """
        optional: dict[str, Answerer] = {}
        if off:
            optional[OFF] = self._agentspec(OFF, speculation=False)
        if kept:
            optional[KEPT] = self._keeping_peer
        return {
            TRANSFORMERS: self._peer,
            **optional,
            COLD: lambda prompt, session: self._agentspec(f"{COLD}: {session}")(prompt, session),
            warm_name(warm): self._agentspec(WARM),
        }

    def measure(self, workflows: Sequence[Workflow], variants: Mapping[str, Answerer]) -> tuple[RunTable, PromptTokens]:
        table = RunTable("agent sessions", turns=len(workflows[0].turns))
        self.transformers(self._prompt(workflows[0], 0), 1)  # the first call includes one-time setup
        for index, workflow in enumerate(workflows):
            for label, answerer in rotated(variants, index):
                self.progress(f"session {index + 1} of {len(workflows)}: {label}")
                for run in self.loop.run_until_complete(self._answers(workflow, answerer)):
                    table.add(label, run)
        lengths = [tuple(len(self._prompt(flow, turn)) for turn in range(table.turns)) for flow in workflows]
        return table, tuple(lengths)

    async def _answers(self, workflow: Workflow, answerer: Answerer) -> list[Run]:
        """The answers of one session under one variant."""
        return [await answerer(self._prompt(workflow, turn), workflow.name) for turn in range(len(workflow.turns))]

    def _prompt(self, workflow: Workflow, turn: int) -> list[int]:
        return self.backend.encode_chat(workflow.messages(turn))

    def _agentspec(self, tenant: str, *, speculation: bool = True) -> Answerer:
        async def answer(prompt: Sequence[int], session: str) -> Run:
            labels = Labels(session, workflow="coding agent")
            return await ask(self.backend, prompt, GREEDY, tenant, labels=labels, speculation=speculation)

        return answer

    async def _peer(self, prompt: Sequence[int], session: str) -> Run:
        return self.transformers(prompt, MAX_TOKENS)

    async def _keeping_peer(self, prompt: Sequence[int], session: str) -> Run:
        return Run(*self.peer.continue_from(prompt, MAX_TOKENS))
