"""Keeps the tenants of a gateway apart in the upstreams that they share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from agentspec.backends.base import SharesCaches
from agentspec.errors import ConfigurationError
from agentspec.runtime.own_loop import run_on_own_loop
from agentspec.settings.server import ServerSettings

if TYPE_CHECKING:
    from agentspec.backends.openai.isolation import TenantIsolation


class UpstreamTenants:
    """The tenants that are served, and how upstreams tell them apart: of several, each needs its salt. Thread-safe."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._names: Collection[str] = settings.tenant_names
        self._upstreams: Sequence[SharesCaches] = ()
        self._joining = threading.Lock()
        self.isolation: TenantIsolation | None = None

    def separate(self, upstreams: Sequence[SharesCaches]) -> None:
        """Tell every upstream's backend how. Raises `ConfigurationError` if one that answers cannot do it."""
        if not upstreams:
            return
        from agentspec.backends.openai.isolation import TenantIsolation

        secret = self._settings.read_secret()
        with self._joining:  # a reload may change the tenants meanwhile
            self.isolation = isolation = TenantIsolation(secret, required=len(self._names) > 1)
        self._upstreams = upstreams
        for upstream in upstreams:
            upstream.isolate(isolation)
        if isolation.required:
            run_on_own_loop(self._check_and_leave)

    async def _check_and_leave(self) -> None:
        for upstream in self._upstreams:
            await upstream.check_isolation()
            await upstream.leave_loop()

    def serve(self, names: Collection[str]) -> None:
        """Note that these are the tenants from now on. Upstreams are not checked: `check` does."""
        with self._joining:
            self._names = frozenset(names)
            if self.isolation is not None:
                self.isolation.required = len(names) > 1

    async def check(self, names: Collection[str]) -> None:
        """Raises `ConfigurationError` if these would be several tenants in place of one, and an upstream that answers
        cannot keep them apart.
        """
        if len(names) > 1 and self.isolation is not None and not self.isolation.required:
            try:
                await asyncio.gather(*(upstream.check_isolation() for upstream in self._upstreams))
            except ConfigurationError as error:
                raise ConfigurationError(f"{error.message}; either takes a restart") from None
