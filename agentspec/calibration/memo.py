"""Memoizes model calls: a repeated greedy request is answered from memory, with the time that the first call took."""

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
    """The deltas that a model sent until the caller stopped reading, and the seconds they took."""

    deltas: list[Delta] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class CallMemo:
    """Calls by backend and exact request. `seconds` sums the time of all calls, including calls answered from memory.

    Only for deterministic answers: temperature 0, and one call at a time. Failed calls are not memoized.
    """

    calls: dict[tuple[int, str], MemoizedCall] = field(default_factory=dict)
    seconds: float = 0.0
    made: int = 0
    remembered: int = 0

    def roles(self, roles: Mapping[str, ModelRole]) -> dict[str, ModelRole]:
        """The same roles with memoizing backends; a model in two roles remains one model."""
        copies = {id(m): replace(m, backend=MemoizingBackend(m.backend, self)) for m in roles.values()}
        return {name: copies[id(model)] for name, model in roles.items()}


class MemoizingBackend:
    """A backend that memoizes the calls of another backend, which it does not own."""

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
        """Does nothing: whoever built the other backend closes it."""

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
            self._keep(key, call)  # the caller has its step and stopped reading
            raise
        finally:
            self._memo.seconds += call.seconds
        self._keep(key, call)

    def _keep(self, key: tuple[int, str], call: MemoizedCall) -> None:
        self._memo.made += 1
        self._memo.calls[key] = call
