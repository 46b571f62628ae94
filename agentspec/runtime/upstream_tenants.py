"""Keeps the tenants of a gateway apart in the upstreams that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentspec.backends.base import SharesCaches
from agentspec.runtime.own_loop import run_on_own_loop
from agentspec.settings.server import ServerSettings

if TYPE_CHECKING:
    from agentspec.backends.openai.isolation import TenantIsolation


class UpstreamTenants:
    """The tenants that are served, and how upstreams tell them apart: of several, each needs its salt."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._upstreams: Sequence[SharesCaches] = ()
        self.isolation: TenantIsolation | None = None

    def separate(self, upstreams: Sequence[SharesCaches]) -> None:
        """Tell every upstream's backend how. Raises `ConfigurationError` if one that answers cannot do it."""
        if not upstreams:
            return
        from agentspec.backends.openai.isolation import TenantIsolation

        secret = self._settings.read_secret()
        self.isolation = isolation = TenantIsolation(secret, required=len(self._settings.tenant_names) > 1)
        self._upstreams = upstreams
        for upstream in upstreams:
            upstream.isolate(isolation)
        if isolation.required:
            run_on_own_loop(self._check_and_leave)

    async def _check_and_leave(self) -> None:
        for upstream in self._upstreams:
            await upstream.check_isolation()
            await upstream.leave_loop()
