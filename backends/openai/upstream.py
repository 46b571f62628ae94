"""An OpenAI-compatible endpoint as the gateway forwards to it: added fields and headers, and isolated tenants."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from types import NoneType
from typing import Any
from urllib.parse import quote

from agentspec.backends.base import CHAT, COMPLETIONS, RESPONSES
from agentspec.backends.http import Endpoint, Transport, UpstreamResponse
from agentspec.backends.openai import fields as wire
from agentspec.backends.openai.fields import PRIORITY, SESSION
from agentspec.backends.openai.isolation import SALT, TenantIsolation, require_salts
from agentspec.backends.openai.server_kind import ServerDetector
from agentspec.backends.openai.tokenization import ServerTokenization
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError, UpstreamIsolationError
from agentspec.protocol.headers import label_headers, read_labels
from agentspec.types import DEFAULT_TENANT, Labels

_TRANSLATED = ("prediction", PRIORITY)  # fields of requests that some servers get in another form
_LABELLED = (CHAT, COMPLETIONS, RESPONSES)  # where vLLM accepts salts and arguments in addition to OpenAI's


class Upstream:
    """An OpenAI-compatible endpoint, to which requests are forwarded unchanged.

    Errors call the endpoint `name`; without a name, by its address. The API key comes from the settings or a key file
    and appears in no `repr`, message or log. `address` is the one to connect to, if the URL's host has several.
    Raises `ConfigurationError` when the key file cannot be read. `endpoint` is the way to the server.
    """

    def __init__(
        self,
        settings: OpenAISettings,
        *,
        name: str | None = None,
        transport: Transport | None = None,
        address: str | None = None,
    ) -> None:
        self.settings = settings
        self.endpoint = Endpoint(settings, name=name, transport=transport, address=address)
        self.aclose, self.leave_loop = self.endpoint.aclose, self.endpoint.leave_loop
        self._detector = ServerDetector(self.endpoint, settings)
        self.server_kind = self._detector.kind  # what the server is; None if it has never answered
        self._isolation: TenantIsolation | None = None

    def forward(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        query: str = "",
        tenant: str = DEFAULT_TENANT,
        above: bool = False,
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Forward a request byte for byte to `path` below the base URL, or, `above`, next to its /v1; the caller
        checks that the path is allowed.

        With several tenants, request ids and the names of sessions and workflows in `headers` (lower case) are replaced
        by the tenant's own. Error answers are returned like others, with status and body. Leaving the block cancels the
        upstream's work. Raises `UpstreamError` if nothing answers, and for redirects.
        """
        labels = self._own_labels(tenant, read_labels(headers))
        added = self._session_headers(labels)
        if self._isolation is not None and self._isolation.required:
            headers = self._isolation.headers(tenant, headers) | label_headers(labels)
        return self.endpoint.send(method, path, headers=headers, body=body, query=query, added=added, above=above)

    def isolate(self, isolation: TenantIsolation) -> None:
        """Keep tenants apart from now on, unless the settings let them share this upstream."""
        self._isolation = isolation

    async def check_isolation(self) -> None:
        """Raises `ConfigurationError` if the upstream cannot keep several tenants apart, and may not be shared.

        One that does not answer now is asked again by each request.
        """
        if not self.settings.shared_upstream:
            require_salts(await self._detector.kind(), self.endpoint.name)

    async def body_fields(
        self, path: str, tenant: str, labels: Labels, given: Mapping[str, Any], off: Collection[str] = ()
    ) -> dict[str, Any]:
        """The fields to set in a body for `path`, which already has the fields `given`.

        vLLM gets the labels and the tokens of a prediction. vLLM and SGLang get the session's name and what is switched
        `off`, and, if the settings say so, the client's priority on their own scale. With several tenants both get a
        salt for each tenant, and the tenant's own names of sessions and workflows. May wait until the upstream is
        recognised. Raises `UpstreamIsolationError` if it is neither, `InvalidRequestError` for a salt that is none.
        """
        salts = await self._salts(tenant, given)
        if path not in _LABELLED:
            return salts
        if path == CHAT and self.settings.system_messages == "first":
            salts |= wire.system_fields(given)
        sent = labels
        if self._apart:
            own = wire.labels_in(given)
            named = Labels(labels.session or own.session, labels.workflow or own.workflow, labels.step)
            sent = self._apart.labels(tenant, named)
            if not isinstance(given.get(SESSION), (str, NoneType)):
                raise InvalidRequestError(f"{SESSION} must be a string", param=SESSION)
        if not (off or sent != Labels() or any(given.get(name) is not None for name in _TRANSLATED)):
            return salts
        kind = await self._detector.kind()
        fields = salts | (await self._vllm_fields(sent, given) if kind == "vllm" else {})
        session = self._own_labels(tenant, labels).session
        if session is not None and kind in ("vllm", "sglang") and (self._apart or not given.get(SESSION)):
            fields[SESSION] = session  # else the client's own is sent
        fields |= wire.priority_fields(self.settings, kind, given)
        return fields | (wire.switch_fields(kind, path, off, {**given, **fields}) if off else {})

    async def _vllm_fields(self, sent: Labels, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields for our drafter in a vLLM server: the labels and the prediction."""
        fields = wire.label_fields(sent, given)
        if given.get("prediction") is not None:
            model = self.settings.model or str(given.get("model"))
            fields |= await wire.prediction_fields(self.endpoint, model, {**given, **fields})
        return fields

    async def has_route(self, path: str, headers: Mapping[str, str], off: Collection[str] = ()) -> bool:
        """Whether requests to `path` can be forwarded: the upstream has the route, and needs no salt there that the
        route cannot carry; nor one of the switches `off` that vLLM or SGLang take at another one.
        """
        kind = await self._detector.kind() if off else None
        if wire.takes_switches(kind, CHAT) and not wire.takes_switches(kind, path):
            return False
        return (self._apart is None or path in _LABELLED) and await self._detector.has_route(path, headers)

    def tokenizer_of(self, model: str) -> ServerTokenization:
        """vLLM's tokenizer endpoints for `model`, whether the upstream has them or not."""
        return ServerTokenization(self.endpoint, model)

    @property
    def _apart(self) -> TenantIsolation | None:
        """How to keep tenants apart here; None if there is no need to."""
        isolation = self._isolation
        return isolation if isolation and isolation.required and not self.settings.shared_upstream else None

    def _own_labels(self, tenant: str, labels: Labels) -> Labels:
        return self._apart.labels(tenant, labels) if self._apart else labels

    def _session_headers(self, labels: Labels) -> dict[str, str]:
        """The header by which SGLang's router sends all calls of the session in `labels` to one server."""
        if labels.session is None or self._detector.known != "sglang":
            return {}
        return {"x-smg-routing-key": quote(labels.session, safe=" !#$&'()*+,/:;=?@[]")}

    async def _salts(self, tenant: str, given: Mapping[str, Any]) -> dict[str, Any]:
        if self._isolation is None or not (self._apart or given.get(SALT)):
            return {}
        kind = await self._detector.kind()
        if kind in ("vllm", "sglang"):
            return self._isolation.salts(kind, tenant, given, apart=self._apart is not None)
        if self._apart:
            raise UpstreamIsolationError(
                f"upstream {self.endpoint.name} is not known to be vLLM or SGLang now, so it cannot keep the"
                " caches of several tenants apart; try again later, or let the operator set shared_upstream for it"
            )
        return {}
