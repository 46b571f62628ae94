"""Routes that the gateway does not know, and that the operator lists to be passed to the only upstream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.pool.pool import Pool
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamIsolationError
from agentspec.proxy.auth import Caller
from agentspec.proxy.body.upstream_fields import check_head
from agentspec.proxy.endpoint import Exchange, GenerationEndpoint
from agentspec.proxy.forwarding import StreamInspector, pass_through, with_fields
from agentspec.proxy.request_record import RequestRecord
from agentspec.runtime import Route
from agentspec.settings.load import Settings
from agentspec.telemetry.metrics import OTHER


def sole_upstream(settings: Settings) -> str:
    """The name of the only upstream. Raises `ConfigurationError` if there is none, or several."""
    upstreams = [name for name, backend in settings.backends.items() if not backend.local]
    if len(upstreams) != 1:
        raise ConfigurationError(
            f"server.extra_routes needs exactly one upstream to pass them to; there are {len(upstreams)}"
        )
    return upstreams[0]


@dataclass(slots=True)
class ExtraRoute(GenerationEndpoint):
    """`POST` to one route, passed on byte for byte. Slots, sizes, deadlines and refused fields are as elsewhere.

    What the server keeps of such requests is its own business, so that several tenants need `shared_upstream`.
    """

    root: ClassVar[str] = ""
    upstream: str = ""

    def _route(self, fields: Mapping[str, Any], caller: Caller, record: RequestRecord) -> Route:
        if not isinstance(fields.get("model"), str):
            record.model = OTHER
            return Route(self.upstream, self.ready().backends()[self.upstream], "")
        route = super(ExtraRoute, self)._route(fields, caller, record)
        # All servers of all pools are the only upstream's.
        if route.backend_name != self.upstream and not isinstance(route.backend, PoolBackend):
            message = f"{self.path} is passed to an upstream that does not serve this model"
            raise InvalidRequestError(message, param="model")
        return route

    async def _try(self, exchange: Exchange, pool: Pool) -> None:
        await pool.prepare()
        for member, _ in pool.members():  # before one is chosen: it is no server's failure
            self._refuse_unsalted(member.backend)
        await super(ExtraRoute, self)._try(exchange, pool)

    async def _respond(self, exchange: Exchange) -> None:
        backend, model, body = exchange.route.backend, exchange.route.upstream_model, exchange.body
        assert isinstance(backend, OpenAIBackend)
        self._refuse_unsalted(backend)
        check_head(exchange.scope)
        await self._run(exchange, self._check, exchange.fields, backend)
        if isinstance(asked := exchange.fields.get("model"), str) and asked != model:
            body = await with_fields(body, exchange.fields, {"model": model})
        exchange.release()
        path, above = self.path.removeprefix("/v1"), not self.path.startswith("/v1/")
        await pass_through(exchange, backend, path, body, StreamInspector(0), above=above)

    def _refuse_unsalted(self, server: OpenAIBackend) -> None:
        """Raise `UpstreamIsolationError` for a server that needs salts, which this route cannot carry."""
        if server.needs_salt:
            message = f"{self.path} cannot be kept apart by tenant: the operator may set shared_upstream"
            raise UpstreamIsolationError(message)
