"""Routes that the gateway does not know, and that the operator lists to be passed to the only upstream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.pool.pool import Pool
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamIsolationError
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.endpoint import GatewayEndpoint
from agentspec.proxy.forwarding import StreamInspector, forward, with_fields
from agentspec.proxy.request_context import RequestContext
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
class ExtraRoute(GatewayEndpoint):
    """`POST` to one route, passed on byte for byte. What the server stores of such requests is its own business, so
    that several tenants need `shared_upstream`.
    """

    root: ClassVar[str] = ""
    upstream: str = ""

    def _route(self, fields: Mapping[str, Any], strategy: str | None, answer: RequestAnswer) -> Route:
        if not isinstance(fields.get("model"), str):
            answer.model = OTHER
            return Route(self.upstream, self.services.ready().backends()[self.upstream], "")
        route = super(ExtraRoute, self)._route(fields, strategy, answer)
        # All servers of all pools are the only upstream's.
        if route.backend_name != self.upstream and not isinstance(route.backend, PoolBackend):
            message = f"{self.path} is passed to an upstream that does not serve this model"
            raise InvalidRequestError(message, param="model")
        return route

    async def _try(self, context: RequestContext, body: RequestBody, answer: RequestAnswer, pool: Pool) -> None:
        await pool.prepare()
        for member, _ in pool.members():  # before one is chosen: it is no server's failure
            self._refuse_unsalted(member.backend)
        await super(ExtraRoute, self)._try(context, body, answer, pool)

    async def respond(self, context: RequestContext, body: RequestBody, answer: RequestAnswer) -> None:
        model = context.route.upstream_model
        self._refuse_unsalted(context.upstream)
        await self.check(context, body)
        asked = body.fields.get("model")
        data = await with_fields(body, {"model": model} if isinstance(asked, str) and asked != model else {})
        path, above = self.path.removeprefix("/v1"), not self.path.startswith("/v1/")
        await forward(context, body, answer, StreamInspector(0), data, path=path, above=above)

    def _refuse_unsalted(self, server: OpenAIBackend) -> None:
        if server.needs_salt:
            message = f"{self.path} cannot keep tenants apart: the operator may set shared_upstream"
            raise UpstreamIsolationError(message)
