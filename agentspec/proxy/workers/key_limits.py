"""Limits of API keys that hold across processes: the parent counts, and a worker asks for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentspec.errors import OverRateLimitError, RateLimitError
from agentspec.proxy.metering.demand import Demand
from agentspec.proxy.metering.key_limits import KeyLimits, Owner, Settle
from agentspec.proxy.metering.limiter import Standing, Verdict
from agentspec.settings.server import ServerSettings

Send = Callable[..., None]
Refusal = RateLimitError | OverRateLimitError
Triple = tuple[str, str, int]  # a tenant, a key and a number of tokens


@dataclass(slots=True)
class WorkerKeyLimits:
    """What one worker's requests hold of their keys' limits, in the parent. `send` sends a message to the worker.

    Requests have numbers, which the worker gives them. The answer to `admit` is "limited".
    """

    limits: KeyLimits
    send: Send
    _running: dict[int, tuple[Settle, int]] = field(default_factory=dict)

    def admit(self, number: int, tenant: str, key: str, prompt: int, answer: int, bounded: bool) -> None:
        """Decide about a request with this demand."""
        verdict, settle = self.limits.decide((tenant, key), Demand(prompt, answer, bounded))
        if settle is not None and verdict.ticket is not None:
            self._running[number] = settle, verdict.ticket.tokens
        self.send("limited", number, verdict.standing, _told(verdict.refusal))

    def settle(self, number: int, tokens: int) -> None:
        """A request is over that took so many tokens."""
        found = self._running.pop(number, None)
        if found is not None:
            found[0](tokens)

    def recorded(self, day: int, amounts: Iterable[Triple], stored: Iterable[Triple]) -> None:
        """As of `KeyLimits`."""
        self.limits.recorded(day, _by_owner(amounts), _by_owner(stored))

    def leave_all(self) -> None:
        """End the requests of a worker that is gone; nobody knows what they took, so that the estimate stays."""
        self.send = lambda *message: None
        for number, (_, tokens) in list(self._running.items()):
            self.settle(number, tokens)


class SharedKeyLimits:
    """The key limits of one worker, which asks the parent by `send`. `answered` is told what the parent says."""

    def __init__(self) -> None:
        self.send: Send = lambda *message: None
        self._owners: frozenset[Owner] = frozenset()
        self._asked: dict[int, asyncio.Future[Verdict]] = {}
        self._number = 0

    def has(self, owner: Owner) -> bool:
        """As of `KeyLimits`."""
        return owner in self._owners

    async def admit(self, owner: Owner, demand: Demand) -> tuple[Verdict, Settle | None]:
        """As of `KeyLimits`."""
        self._number += 1
        number = self._number
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send("admit", number, *owner, demand.prompt, demand.answer, demand.bounded)
        try:
            verdict = await answer
        except BaseException:
            self._settle(number, 0)  # the parent may have admitted it
            raise
        finally:
            del self._asked[number]
        return verdict, None if verdict.refusal is not None else partial(self._settle, number)

    def answered(self, number: int, standing: Standing, refusal: list[Any]) -> None:
        """Take the parent's answer to a request's question."""
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(Verdict([(*one,) for one in standing], refusal=_refusal(refusal)))

    def recorded(self, day: int, amounts: Mapping[Owner, int], stored: Mapping[Owner, int]) -> None:
        """As of `KeyLimits`."""
        self.send("recorded", day, _triples(amounts), _triples(stored))

    def update(self, settings: ServerSettings) -> None:
        """Note which keys have limits; the limits are the parent's."""
        self._owners = frozenset(settings.limits_of_keys)

    def _settle(self, number: int, tokens: int) -> None:
        self.send("settle", number, tokens)


def _told(refusal: Refusal | None) -> list[Any]:
    if isinstance(refusal, RateLimitError):
        return [refusal.message, refusal.limit, int(refusal.retry_after)]
    return [] if refusal is None else [refusal.message, refusal.param]


def _refusal(told: Sequence[Any]) -> Refusal | None:
    if len(told) == 3:
        message, limit, seconds = told
        return RateLimitError(message, limit=limit, retry_after=seconds)
    return OverRateLimitError(told[0], param=told[1]) if told else None


def _triples(amounts: Mapping[Owner, int]) -> list[Triple]:
    return [(*owner, tokens) for owner, tokens in amounts.items()]


def _by_owner(triples: Iterable[Triple]) -> dict[Owner, int]:
    return {(tenant, key): tokens for tenant, key, tokens in triples}
