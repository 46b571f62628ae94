"""Whole sessions of a coding agent, end to end: transformers, agentspec off, on, and on after other sessions.

The prompt of each turn is the one before with an answer and what the tools said: it grows from about 400 to about 3900
tokens. transformers reads it afresh each time, as `generate` does; agentspec keeps the session's key/value rows.
Each session is run under all variants in an order that rotates. All see the same prompts, since the history is the
script's (`agent_workflows`). Answers are greedy, a pair is one session under two variants, and time is wall time from
prompt to last token, reading prompts included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks.agent_workflows import Workflow, measured_workflows, other_workflows
from agentspec.benchmarks.decode import COLD, OFF, TRANSFORMERS, Progress, Run, Table, collect, warm_name
from agentspec.benchmarks.stats import rotated
from agentspec.benchmarks.transformers_peer import Peer
from agentspec.types import GenerateRequest, Labels, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

TURNS = 8
MAX_TOKENS = 128
WARM_TOGETHER = 4  # other sessions that run at once while the cache is warmed

KEPT = "transformers, keeping its rows"
WARM = "on, warm"  # the tenant that has other sessions behind it


Answer = Callable[[Sequence[int], str], Awaitable[Run]]
"""From a prompt's token ids and the name of its session to an answer."""

PromptTokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The runs, `TURNS` in a row for each session, and how many tokens each session's prompts had.

    `warm` is the variant that had other sessions behind it.
    """

    table: Table
    warm: str
    prompt_tokens: PromptTokens


def run_agent(model: str, *, warm: int, progress: Progress, **extras: bool) -> AgentReport:
    """Measure every variant, the warm one after `warm` other sessions; `extras` as `AgentBench.variants` has them.

    Raises what the backend raises.
    """
    bench = AgentBench.load(model, progress)
    try:
        bench.warm(other_workflows(warm, TURNS))
        table, prompt_tokens = bench.measure(measured_workflows(TURNS), bench.variants(warm, **extras))
        return AgentReport(table, warm_name(warm), prompt_tokens)
    finally:
        bench.close()


@dataclass(slots=True)
class AgentBench:
    """One loaded model and its plain transformers twin."""

    backend: TorchBackend
    peer: Peer
    loop: asyncio.AbstractEventLoop
    progress: Progress

    @classmethod
    def load(cls, model: str, progress: Progress) -> AgentBench:
        from agentspec.backends.torch import TorchBackend
        from agentspec.cache import SuffixCache

        progress(f"loading {model}")
        backend = TorchBackend.load(TorchSettings(model=model), cache=SuffixCache.open())
        return cls(backend, Peer.beside(backend, model), asyncio.new_event_loop(), progress)

    def close(self) -> None:
        self.peer.close()
        self.loop.run_until_complete(self.backend.aclose())
        self.loop.close()

    def warm(self, workflows: Sequence[Workflow]) -> None:
        """Let the warm variant's tenant have been through these sessions, some of them at once."""
        self.loop.run_until_complete(self._warm(workflows))

    async def _warm(self, workflows: Sequence[Workflow]) -> None:
        places = asyncio.Semaphore(WARM_TOGETHER)
        answer = self._agentspec(WARM)

        async def play(number: int, workflow: Workflow) -> None:
            async with places:
                self.progress(f"warming: session {number} of {len(workflows)}")
                await self._play(workflow, answer)

        await asyncio.gather(*(play(number, workflow) for number, workflow in enumerate(workflows, 1)))

    def variants(self, warm: int, *, off: bool = False, kept: bool = False) -> dict[str, Answer]:
        """What is compared; on request also agentspec without drafts, and transformers with rows kept between turns.

        Every measured session is new to its cold tenant. The warm one goes on remembering, measured sessions too.
        """
        optional: dict[str, Answer] = {}
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

    def measure(self, workflows: Sequence[Workflow], variants: Mapping[str, Answer]) -> tuple[Table, PromptTokens]:
        table = Table("agent sessions", turns=len(workflows[0].turns))
        self.peer.generate(self._prompt(workflows[0], 0), 1)  # its first call sets things up that later ones find
        for index, workflow in enumerate(workflows):
            for label, answer in rotated(variants, index):
                self.progress(f"session {index + 1} of {len(workflows)}: {label}")
                for run in self.loop.run_until_complete(self._play(workflow, answer)):
                    table.add(label, run)
        lengths = [tuple(len(self._prompt(flow, turn)) for turn in range(table.turns)) for flow in workflows]
        return table, tuple(lengths)

    async def _play(self, workflow: Workflow, answer: Answer) -> list[Run]:
        """The answers of one session under one variant."""
        return [await answer(self._prompt(workflow, turn), workflow.name) for turn in range(len(workflow.turns))]

    def _prompt(self, workflow: Workflow, turn: int) -> list[int]:
        return self.backend.encode_chat(workflow.messages(turn))

    def _agentspec(self, tenant: str, *, speculation: bool = True) -> Answer:
        async def answer(prompt: Sequence[int], session: str) -> Run:
            request = GenerateRequest(
                model=self.backend.model_name,
                token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
                labels=Labels(session=session, workflow="coding agent"),
                tenant=tenant,
                speculation=speculation,
            )
            return await collect(self.backend, request)

        return answer

    async def _peer(self, prompt: Sequence[int], session: str) -> Run:
        return Run(*self.peer.generate(prompt, MAX_TOKENS))

    async def _keeping_peer(self, prompt: Sequence[int], session: str) -> Run:
        return Run(*self.peer.continue_from(prompt, MAX_TOKENS))
