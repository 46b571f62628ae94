"""Calls of models made once: asked the same again, a greedy model's answer comes from memory, with the time it took."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from agentspec.backends.base import Backend, Capabilities, Tokenization, closing_items, tokenization_of
from agentspec.reasoning.delegation.model_role import ModelRole
from agentspec.types import Delta, GenerateRequest


@dataclass(slots=True)
class Call:
    """What a model said up to where it was no longer listened to, and the seconds it took for that."""

    deltas: list[Delta] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class Memo:
    """Calls by model and request, to the letter. `seconds` adds up the time of all calls, those from memory included.

    Only what always gets the same answer may be remembered: temperature 0, and calls one after another. A call that
    fails or is cancelled is not.
    """

    calls: dict[tuple[int, str], Call] = field(default_factory=dict)
    seconds: float = 0.0
    made: int = 0
    remembered: int = 0

    def roles(self, roles: Mapping[str, ModelRole]) -> dict[str, ModelRole]:
        """The same roles over backends that remember; one model in two roles stays one."""
        copies = {id(m): replace(m, backend=Remembering(m.backend, self)) for m in roles.values()}
        return {name: copies[id(model)] for name, model in roles.items()}


class Remembering:
    """A backend whose calls go into a memo. The backend behind it stays its owner's to close."""

    def __init__(self, inner: Backend, memo: Memo) -> None:
        self._inner = inner
        self._memo = memo

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @property
    def tokenization(self) -> Tokenization | None:
        return tokenization_of(self._inner)

    async def aclose(self) -> None:
        """The backend behind is closed by who built it."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        key = (id(self._inner), repr(request))
        if (known := self._memo.calls.get(key)) is None:
            async with aclosing(self._make(request, key)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        self._memo.remembered += 1
        self._memo.seconds += known.seconds
        for delta in known.deltas:
            yield delta

    async def _make(self, request: GenerateRequest, key: tuple[int, str]) -> AsyncGenerator[Delta]:
        call, answer = Call(), self._inner.generate(request)
        try:
            async with closing_items(answer):
                while True:
                    began = time.perf_counter()
                    try:
                        call.deltas.append(await anext(answer))
                    except StopAsyncIteration:
                        break
                    finally:
                        call.seconds += time.perf_counter() - began
                    yield call.deltas[-1]
        except GeneratorExit:
            self._keep(key, call)  # the step ended before the answer did
            raise
        finally:
            self._memo.seconds += call.seconds
        self._keep(key, call)

    def _keep(self, key: tuple[int, str], call: Call) -> None:
        self._memo.made += 1
        self._memo.calls[key] = call
