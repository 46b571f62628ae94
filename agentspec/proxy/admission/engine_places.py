"""Admits requests to local engines, each with as many places as the engine takes requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from starlette.types import Message

from agentspec.backends.settings import BackendSettings, TorchSettings
from agentspec.proxy.admission.concurrency import ConcurrencyLimiter
from agentspec.proxy.admission.turns import ProgramCall
from agentspec.settings.server import ServerSettings
from agentspec.telemetry.samples import TenantSample

_NO_LIMIT = nullcontext()
_SETTING = "max_active and max_queue of the backend"


class EnginePlaces:
    """A limiter for each local backend, behind the one of all requests.

    A request that an engine refuses because its queue is full is refused whoever sent it. So no more of them than the
    engine takes get there, and who is next is decided here, by the tenants' weights.
    """

    def __init__(self, server: ServerSettings, backends: Mapping[str, BackendSettings]) -> None:
        local = {name: one for name, one in backends.items() if isinstance(one, TorchSettings)}
        self._takes = {name: one.max_active + one.max_queue for name, one in local.items()}
        self._limiters = {
            name: ConcurrencyLimiter(_within(server, takes), setting=_SETTING) for name, takes in self._takes.items()
        }

    def enter(self, backend: str, tenant: str, call: ProgramCall | None = None) -> AbstractAsyncContextManager[Any]:
        """Take a place for a request of `tenant` as an asynchronous context, and wait for it if need be.

        Raises `OverloadedError` if no place is free in time. Upstreams have no such places.
        """
        limiter = self._limiters.get(backend)
        return _NO_LIMIT if limiter is None else limiter.enter(tenant, _silent, call)

    def update(self, server: ServerSettings) -> None:
        """Apply the limits of `server` from now on."""
        for name, limiter in self._limiters.items():
            limiter.update(_within(server, self._takes[name]))

    def add_to(self, samples: list[TenantSample]) -> list[TenantSample]:
        """`samples` of the limiter of all requests, with those that wait here, or were refused here, counted so."""
        found = {one.tenant: one for one in samples}
        for limiter in self._limiters.values():
            for one in limiter.samples():
                known = found.get(one.tenant, TenantSample(one.tenant, 0, 0, 0))
                found[one.tenant] = replace(
                    known,
                    running=known.running - one.waiting,
                    waiting=known.waiting + one.waiting,
                    refused=known.refused + one.refused,
                )
        return list(found.values())


def _within(server: ServerSettings, places: int) -> ServerSettings:
    """The limits for so many places: reserved ones are as large a part of them as they are of all."""
    part = min(1.0, places / server.max_concurrent)
    tenants = {
        name: limits.model_copy(update={"reserved": int(limits.reserved * part)})
        for name, limits in server.tenants.items()
    }
    return server.model_copy(update={"max_concurrent": places, "tenants": tenants})


async def _silent() -> Message:
    """Who waits here has sent its whole request, and is watched already."""
    message: Message = await asyncio.get_running_loop().create_future()
    return message
