"""Model calls made once: a greedy model's answer to the same request comes from memory, with the time it took."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from agentspec.backends.base import Backend, Capabilities, Tokenization, closing_items, tokenization_of
from agentspec.reasoning.delegation.model_role import ModelRole
from agentspec.types import Delta, GenerateRequest


@dataclass(slots=True)
class MemoizedCall:
    """What a model answered until the caller stopped reading, and the seconds that took."""

    deltas: list[Delta] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class CallMemo:
    """Calls by backend and exact request. `seconds` adds up the time of all calls, those from memory included.

    For deterministic answers only: temperature 0, and calls one after another. A call that fails is not remembered.
    """

    calls: dict[tuple[int, str], MemoizedCall] = field(default_factory=dict)
    seconds: float = 0.0
    made: int = 0
    remembered: int = 0

    def roles(self, roles: Mapping[str, ModelRole]) -> dict[str, ModelRole]:
        """The same roles over memoizing backends; one model in two roles stays one."""
        copies = {id(m): replace(m, backend=MemoizingBackend(m.backend, self)) for m in roles.values()}
        return {name: copies[id(model)] for name, model in roles.items()}


class MemoizingBackend:
    """A backend whose calls go into a memo. It does not own the backend behind it."""

    def __init__(self, inner: Backend, memo: CallMemo) -> None:
        self._inner = inner
        self._memo = memo

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @property
    def tokenization(self) -> Tokenization | None:
        return tokenization_of(self._inner)

    async def aclose(self) -> None:
        """Leaves the backend behind open: whoever built it closes it."""

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
        call, answer = MemoizedCall(), self._inner.generate(request)
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

    def _keep(self, key: tuple[int, str], call: MemoizedCall) -> None:
        self._memo.made += 1
        self._memo.calls[key] = call
