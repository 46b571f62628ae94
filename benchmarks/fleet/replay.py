"""Plays drawn sessions to real servers, placed by the policy that the simulation used."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from agentspec.benchmarks.fleet.sessions import DrawnSession
from agentspec.errors import AgentSpecError
from agentspec.placement import POLICIES, Call, Member
from agentspec.simulation.workload import CallShape
from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams

Generate = Callable[[GenerateRequest], AsyncIterator[Delta]]

WORDS = range(1000, 20_000)  # ids of ordinary tokens in any vocabulary


class ReplayFailedError(AgentSpecError):
    """A server ended an answer early, or did not say which tokens it wrote."""


class LiveSessions:
    """Sessions on servers by name. Prompts are random tokens, so that only a session's own past is cached.

    Blocks of prompts are not compared: sessions of this kind share nothing.
    """

    def __init__(self, servers: Mapping[str, Generate], model: str, policy: str, seed: int) -> None:
        self._servers, self._model, self._policy = servers, model, POLICIES[policy]()
        self._draws = random.Random(seed)
        self._run = self._draws.randrange(1 << 30)  # servers have not seen these sessions before
        self._in_flight = dict.fromkeys(servers, 0)

    async def seconds(self, sessions: Sequence[DrawnSession]) -> list[float]:
        """What each session took from its arrival to its last answer. Raises `ReplayFailedError`."""
        began = time.perf_counter()
        return list(await asyncio.gather(*(self._session(one, began) for one in sessions)))

    async def _session(self, session: DrawnSession, began: float) -> float:
        arrival = began + session.arrives
        await asyncio.sleep(arrival - time.perf_counter())
        tokens: list[int] = []
        for call, pause in zip(session.shape.calls, (0.0, *session.pauses), strict=True):
            await asyncio.sleep(pause)
            tokens += self._draws.choices(WORDS, k=call.prompt - len(tokens))
            tokens += await self._placed(session, call, tokens)
        return time.perf_counter() - arrival

    async def _placed(self, session: DrawnSession, call: CallShape, tokens: Sequence[int]) -> list[int]:
        placed = Call(session=f"s{session.number}", workflow=session.shape.workflow)  # as the simulation calls them
        member = self._policy.choose(placed, [Member(name, in_flight=n) for name, n in self._in_flight.items()])
        self._policy.placed(placed, member)
        self._in_flight[member.name] += 1
        try:
            return await self._ask(self._servers[member.name], f"{self._run}-{session.number}", call, tokens)
        finally:
            self._in_flight[member.name] -= 1

    async def _ask(self, generate: Generate, session: str, call: CallShape, tokens: Sequence[int]) -> list[int]:
        """The tokens of the answer, which is as long as it was in the simulation."""
        sampling = SamplingParams(max_tokens=call.answer, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            self._model,
            token_ids=list(tokens),
            sampling=sampling,
            labels=Labels(session, None, None),
            speculation=False,
            extra={"return_token_ids": True},
        )
        answer: list[int] = []
        async for delta in generate(request):
            answer += delta.token_ids
        if len(answer) != call.answer:
            raise ReplayFailedError(
                f"a server wrote {len(answer)} tokens where {call.answer} were asked for: does it know"
                " ignore_eos and return_token_ids?"
            )
        return answer
