"""Recorded sessions in real time: the local engine writes what was recorded, and tools take time and return it.

The sessions of a file pass in their order. Some, evenly spread, run under every variant, in an order that rotates: each
variant is a tenant of its own, whose cache and predictor have learned the sessions before and nothing else. The others
are only learned. A session's time is that of the model's turns and of the tools; users' replies are waited for but do
not count. What the agent has read and written at the end must be the same under every variant, byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks.agent_tools.learning import LearningTimes, learn_session
from agentspec.benchmarks.agent_tools.recorded import RecordedSession, RecordedTools, sessions_of
from agentspec.benchmarks.agent_tools.replay import Matching, calls_of
from agentspec.benchmarks.agent_tools.scripted import ScriptedBackend
from agentspec.benchmarks.agent_tools.timed_report import (
    DRAFTING,
    OFF,
    PREFILL,
    TOOLS,
    VARIANTS,
    AgentTimedReport,
    TimedFile,
    TimedSession,
)
from agentspec.benchmarks.report import Progress, rotated
from agentspec.benchmarks.runs import ask
from agentspec.errors import ConfigurationError
from agentspec.recordings.formats import detect, names_of, read
from agentspec.tools.events import ToolEvent
from agentspec.tools.keys import AgentCaller
from agentspec.tools.policy import ToolPolicy, ToolSpec
from agentspec.tools.prediction.history import ToolCall
from agentspec.tools.session import ToolSession
from agentspec.tools.speculator import ToolSpeculator
from agentspec.types import GenerateRequest, Labels, Message, SamplingParams

USER_SECONDS = 2.0
MOST_TURNS = 8
PILOT = "pilot"  # the tenant of the first session's trial, which tells how long tools have to take
AGENT = "agent"


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """`sessions` of each file are timed, of `most_turns` turns at most. Tools take `share` of the time with drafts, as
    a trial of the first session foresees it, or `tool_seconds` each; users take `user_seconds` to reply.
    """

    read_only: Sequence[str]
    sessions: int = 7
    share: float = 0.5
    tool_seconds: float | None = None
    user_seconds: float = USER_SECONDS
    most_turns: int = MOST_TURNS


def run_agent_timed(model: str, paths: Sequence[Path], plan: TimedPlan, progress: Progress) -> AgentTimedReport:
    """Time sessions of each file on the model. Raises what the backend raises, and `ConfigurationError` for a file
    that cannot be read, or that has no calls.
    """
    from agentspec.cache import SuffixCache

    files = [
        (name, sessions_of(read(path, detect(path)), plan.most_turns))
        for path, name in zip(paths, names_of(paths), strict=True)
    ]
    progress(f"loading {model}")
    with SuffixCache.open() as cache:
        backend = ScriptedBackend.load(TorchSettings(model=model, prefill_next_turn=False), cache=cache)
        bench = AgentTimedBench(cast(ScriptedBackend, backend), plan, progress)
        return asyncio.run(bench.measure(files))


@dataclass(slots=True)
class AgentTimedBench:
    """Runs sessions on one loaded model, which is closed at the end."""

    backend: ScriptedBackend
    plan: TimedPlan
    progress: Progress

    async def measure(self, files: Iterable[tuple[str, Sequence[RecordedSession]]]) -> AgentTimedReport:
        try:
            return AgentTimedReport([await self._file(*one) for one in files])
        finally:
            await self.backend.aclose()

    async def _file(self, name: str, sessions: Sequence[RecordedSession]) -> TimedFile:
        fitting = [one for one in sessions if one.waits and self._fits(one)]
        if not fitting:
            raise ConfigurationError(f"{name}: no session calls tools and fits the model's context")
        chosen, tenants = _spread(fitting, self.plan.sessions), _Tenants(self, name, sessions)
        try:
            times = await self._times(tenants, sessions, chosen)
            found = TimedFile(name, times.tool, {one: [] for one in VARIANTS})
            for session in sessions:
                if session in chosen:
                    await self._session(tenants, session, found, len(chosen))
                else:
                    self.progress(f"{name}: learning {session.name}")
                    await tenants.learn(session, times)
            return found
        finally:
            tenants.close()

    async def _session(self, tenants: _Tenants, session: RecordedSession, found: TimedFile, of: int) -> None:
        """Run a session under every variant."""
        number = len(found.sessions[OFF])
        for variant, ran in rotated(found.sessions, number):
            self.progress(f"{found.name}: session {number + 1} of {of}, {variant}")
            ran.append(await tenants.run(variant, session, found.tool))

    def _fits(self, session: RecordedSession) -> bool:
        """Whether the model can read the session; a token has three characters of such text or more."""
        heard = sum(len(str(one["content"])) + 30 for turn in session.turns for one in turn.heard)
        return (heard + session.characters) / 3 < self.backend.context_length

    async def _times(
        self, tenants: _Tenants, sessions: Sequence[RecordedSession], chosen: Sequence[RecordedSession]
    ) -> LearningTimes:
        """What tools and turns take, by what the first of the chosen sessions takes with drafts."""
        self.progress("how long turns take")
        first = chosen[0]
        for session in sessions[: sessions.index(first)]:
            await tenants.record(session, (PILOT,))
        trial = await tenants.run(PILOT, first, 0.0, user_seconds=0.0)
        turns, characters, waits = (sum(sizes) for sizes in zip(*(one.sizes for one in chosen), strict=True))
        model_seconds = trial.seconds * characters / first.characters
        share, tool = self.plan.share, self.plan.tool_seconds
        return LearningTimes(
            share / (1.0 - share) * model_seconds / waits if tool is None else tool, model_seconds / turns
        )


def _spread(sessions: Sequence[RecordedSession], count: int) -> list[RecordedSession]:
    """At most `count` of them, each from the middle of its part of the file."""
    count = min(count, len(sessions))
    return [sessions[(2 * at + 1) * len(sessions) // (2 * count)] for at in range(count)]


class _Tenants:
    """The variants' tenants for one file: what each has learned lies in the backend's cache and in its speculator."""

    def __init__(self, bench: AgentTimedBench, file: str, sessions: Sequence[RecordedSession]) -> None:
        self._backend, self._plan, self._file = bench.backend, bench.plan, file
        names = sorted({call.name for one in sessions for turn in one.turns for call in turn.calls})
        matching = Matching(bench.plan.read_only)
        self._read_only = frozenset(name for name in names if name in matching)
        self._specs = [ToolSpec(name) for name in names]
        self._events: list[ToolEvent] = []
        policy = ToolPolicy(self._read_only)
        self._speculators = {one: ToolSpeculator(policy, on_event=self._events.append) for one in (TOOLS, PREFILL)}

    def close(self) -> None:
        for speculator in self._speculators.values():
            speculator.close()

    async def learn(self, session: RecordedSession, times: LearningTimes) -> None:
        """Learn a session without running it."""
        for variant, speculator in self._speculators.items():
            learn_session(session, speculator.learned, self._caller(variant, session), Matching(self._read_only), times)
        await self.record(session, (DRAFTING, TOOLS, PREFILL))

    async def record(self, session: RecordedSession, variants: Sequence[str]) -> None:
        """Let the caches of these variants learn the answers of a session."""
        messages: list[Message] = []
        for turn in session.turns:
            messages += turn.heard
            prompt, count = self._backend.encode_chat(messages), self._backend.says(turn.answer)
            if len(prompt) + count > self._backend.context_length:
                return
            for variant in variants:
                labels, tenant = Labels(session.name, workflow=AGENT), self._tenant(variant)
                request = GenerateRequest("", token_ids=prompt, labels=labels, tenant=tenant)
                await self._backend.record(request, self._backend.script)
            messages.append({"role": "assistant", "content": turn.answer})

    async def run(
        self, variant: str, session: RecordedSession, tool: float, *, user_seconds: float | None = None
    ) -> TimedSession:
        """Run a session in real time, where every tool takes `tool` seconds and users by default those of the plan."""
        waits = self._plan.user_seconds if user_seconds is None else user_seconds
        tools = RecordedTools(session, self._read_only, tool)
        agent = _TimedAgent(self._backend, variant, self._tenant(variant), session, tools)
        self._events.clear()
        speculator = self._speculators.get(variant)
        if speculator is not None:
            with ToolSession(speculator, self._caller(variant, session)) as opened:
                opened.offers(self._specs)
                agent.early = opened
                await agent.run(waits)
        else:
            await agent.run(waits)
        agent.timed.starts = sum(event.outcome == "launch" for event in self._events)
        agent.timed.used = sum(event.outcome == "hit" for event in self._events)
        agent.timed.wasted = sum(event.seconds for event in self._events if event.outcome not in ("launch", "hit"))
        return agent.timed

    def _tenant(self, variant: str) -> str:
        return f"{self._file}/{variant}"

    def _caller(self, variant: str, session: RecordedSession) -> AgentCaller:
        return AgentCaller(self._tenant(variant), AGENT, session.name)


@dataclass(slots=True)
class _TimedAgent:
    """One run of a session under a variant."""

    backend: ScriptedBackend
    variant: str
    tenant: str
    session: RecordedSession
    tools: RecordedTools
    early: ToolSession | None = None
    timed: TimedSession = field(default_factory=TimedSession)
    clock: Callable[[], float] = time.perf_counter
    messages: list[Message] = field(default_factory=list)

    async def run(self, user_seconds: float) -> None:
        """Run all turns, and keep what was read and written."""
        results: list[str] = []
        for number, turn in enumerate(self.session.turns):
            if number and not results:
                await asyncio.sleep(user_seconds)
            self.tools.turn, began = number, self.clock()
            self._hear(turn.heard, results)
            calls = await self._speak(turn.answer)
            spoke = self.clock()
            results = await self._call(calls)
            self.timed.model_seconds += spoke - began
            self.timed.tool_seconds += self.clock() - spoke
        self.timed.transcript = json.dumps(self.messages)

    def _hear(self, heard: Iterable[Message], results: list[str]) -> None:
        """Take in what is new, with the results that the tools gave in place of the recorded ones."""
        fresh, names = iter(results), iter([call.name for call in self._last_calls()])
        for recorded in heard:
            role, text = recorded["role"], str(recorded["content"])
            if role == "tool":
                text = next(fresh, text)
            self.messages.append({"role": role, "content": text})
            if self.early is None:
                continue
            if role == "tool":
                self.early.returns(next(names, "unknown"), text)
            else:
                (self.early.says if role == "user" else self.early.reads)(text)

    def _last_calls(self) -> list[ToolCall]:
        return list(calls_of(self.messages[-1])) if self.messages else []

    async def _speak(self, answer: str) -> list[ToolCall]:
        """Have the model write its answer; returns the calls in it."""
        if self.early is not None:
            await self.early.abegin_turn(self.tools.run)
        count = self.backend.says(answer)
        sampling = SamplingParams(temperature=0.0, max_tokens=count)
        labels = Labels(self.session.name, workflow=AGENT)
        prompt = self.backend.encode_chat(self.messages)
        drafted = self.variant != OFF
        run = await ask(self.backend, prompt, sampling, self.tenant, labels=labels, speculation=drafted)
        self.timed.tokens += len(run.tokens)
        self.timed.steps += len(run.tokens) if run.speculation is None else run.speculation.steps
        message = {"role": "assistant", "content": self.backend.decode(run.tokens)}
        self.messages.append(message)
        calls = list(calls_of(message))
        if self.early is not None:
            self.early.end_turn(calls)
        return calls

    async def _call(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run the tools that were called, at once; meanwhile the engine reads ahead under that variant."""
        if not calls:
            return []
        ahead = asyncio.create_task(self._read_ahead()) if self.variant == PREFILL else None
        run, early = self.tools.run, self.early
        if early is None:
            results = await asyncio.gather(*map(run, calls))
        else:
            results = await asyncio.gather(*(early.arun(call, run) for call in calls))
        if ahead is not None:
            ahead.cancel()
            with suppress(asyncio.CancelledError):
                await ahead
        return results

    async def _read_ahead(self) -> None:
        await self.backend.prefill(GenerateRequest("", messages=list(self.messages), tenant=self.tenant))
