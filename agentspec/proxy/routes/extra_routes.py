"""Routes that the gateway does not know, and that the operator lists to be passed to the only upstream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from agentspec.backends.base import Backend
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.attempts import Attempts
from agentspec.backends.pool.backend import PoolBackend
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamIsolationError
from agentspec.placement import Call
from agentspec.proxy.admission import Deadline, until_disconnect
from agentspec.proxy.auth import read_caller
from agentspec.proxy.body.budget import BodyAccount
from agentspec.proxy.body.reading import parse_object, set_values
from agentspec.proxy.body.upstream_fields import check_head
from agentspec.proxy.endpoint import GenerationEndpoint, note_disconnect
from agentspec.proxy.forwarding import StreamInspector, pass_through
from agentspec.proxy.request_record import RequestRecord
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

    async def _answer_to(
        self, body: bytes, scope: Scope, receive: Receive, send: Send, deadline: Deadline, account: BodyAccount
    ) -> None:
        record = RequestRecord.of(scope)
        async with until_disconnect(receive) as client, self.limiter.enter(record.tenant):
            fields = await self.budget.run(record.tenant, len(body), parse_object, body)
            backend = self.ready().backends()[self.upstream]
            record.model = OTHER
            check_head(scope)
            read_caller(Headers(scope=scope), record.tenant)  # they pass as they are, but none that is wrong
            await self._check_tenants(backend)
            async with await self._within_limits(record, body, fields):
                if isinstance(backend, PoolBackend):
                    async for attempt in Attempts(backend.pool, Call(), deadline.at, fallbacks=True):
                        async with attempt:
                            record.attempt = attempt
                            await self._pass(scope, send, attempt.backend, body, fields, deadline, account)
                else:
                    assert isinstance(backend, OpenAIBackend)
                    await self._pass(scope, send, backend, body, fields, deadline, account)
        note_disconnect(client, record)

    async def _check_tenants(self, backend: Backend) -> None:
        """Raise `UpstreamIsolationError` if servers need salts, which this route cannot carry. Asked before a server is
        chosen: it is no server's failure.
        """
        if isinstance(backend, PoolBackend):
            await backend.pool.prepare()
            servers: list[Backend] = [member.backend for member, _ in backend.pool.members()]
        else:
            servers = [backend]
        if any(isinstance(server, OpenAIBackend) and server.needs_salt for server in servers):
            raise UpstreamIsolationError(
                f"{self.path} cannot be kept apart by tenant: the operator may set shared_upstream"
            )

    async def _pass(
        self,
        scope: Scope,
        send: Send,
        backend: OpenAIBackend,
        body: bytes,
        fields: Mapping[str, Any],
        deadline: Deadline,
        account: BodyAccount,
    ) -> None:
        """Pass the request to one server. Raises `InvalidRequestError` for what it may not get."""
        await self.budget.run(RequestRecord.of(scope).tenant, len(body), self._check, fields, backend)
        body = self._named(body, fields)
        path, above = self.path.removeprefix("/v1"), not self.path.startswith("/v1/")
        inspector = StreamInspector(0)
        await pass_through(scope, send, backend, path, body, deadline, inspector, account=account, above=above)

    def _named(self, body: bytes, fields: Mapping[str, Any]) -> bytes:
        """`body` with the upstream's name of the model that it names, if it names one."""
        model = fields.get("model")
        if not isinstance(model, str):
            return body
        route = self.runtime.route(model)
        # All servers of all pools are the only upstream's.
        if route.backend_name != self.upstream and not isinstance(route.backend, PoolBackend):
            raise InvalidRequestError(
                f"{self.path} is passed to an upstream that does not serve this model", param="model"
            )
        return body if route.upstream_model == model else set_values(body, fields, {"model": route.upstream_model})
