"""What is known of a request once its head and body are read: all that the steps behind the door see of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.protocol.headers import (
    label_headers,
    read_labels,
    read_switch,
    refuse_misspelt,
    switched_off,
)
from agentspec.protocol.policy import ANY, MAX_LABEL, PREFIX, StepPolicy
from agentspec.proxy.body.upstream_fields import check_query
from agentspec.telemetry.tracing import trace_headers
from agentspec.types import GenerateRequest, Labels

if TYPE_CHECKING:
    from agentspec.proxy.admission import Deadline
    from agentspec.proxy.answer import RequestAnswer
    from agentspec.proxy.auth import Identity
    from agentspec.runtime import Route

MAX_READ = 4096  # characters of a name that are read; a longer text is no name
_KEYS = ("authorization", "x-api-key")
_OF_HEADERS = {
    "session": (
        *("x-claude-code-session-id", "x-dynamo-session-id", "session-id"),
        *("session_id", "x-session-id", "x-session-affinity"),
    ),
    "workflow": ("x-dynamo-parent-session-id",),
    "step": ("x-claude-code-agent-id",),
}
"""For each label the other headers in which clients send it, the preferred first."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request: who sent it, what it asks of the gateway, and where it goes. Made once; a pool replaces `route` at
    each attempt.

    `api` is the path of its route. `headers` are those that an upstream gets, empty for a model of this process. `off`
    names the switches to send to servers that draft and store themselves; "store" is among them where the
    operator's settings store nothing.
    """

    id: str
    api: str
    method: str
    query: str
    headers: Mapping[str, str]
    key: Identity
    labels: Labels
    policy: StepPolicy
    speculation: bool
    store: bool
    off: tuple[str, ...]
    deadline: Deadline
    route: Route
    stream: bool

    @classmethod
    def of(
        cls,
        scope: Scope,
        headers: Mapping[str, str],
        fields: Mapping[str, Any],
        answer: RequestAnswer,
        api: str,
        deadline: Deadline,
        route: Route,
        policy: StepPolicy = ANY,
        cached: bool = True,
    ) -> RequestContext:
        """The context of the request of `answer`, with this `scope`, these `headers` (each by its first line) and a
        body with these `fields`.

        `cached`: the operator lets the gateway store sequences. Raises `InvalidRequestError` that names the wrong
        header.
        """
        assert answer.key is not None
        refuse_misspelt(headers)
        switches = {name: read_switch(headers, name) for name in ("speculation", "store")}
        labels = _labels(headers, fields)
        forwarded = isinstance(route.backend, OpenAIBackend | PoolBackend)
        return cls(
            id=answer.request_id,
            api=api,
            method=answer.method,
            query=scope.get("query_string", b"").decode("latin-1"),
            headers=upstream_headers(scope, answer, labels) if forwarded else {},
            key=answer.key,
            labels=labels,
            policy=policy if fields.get("priority") is None else replace(policy, priority=None),  # 0 is one too
            **switches,
            off=switched_off(store=switches["store"] and cached, speculation=switches["speculation"]),
            deadline=deadline,
            route=route,
            stream=fields.get("stream") is True,
        )

    @property
    def upstream(self) -> OpenAIBackend:
        assert isinstance(self.route.backend, OpenAIBackend)
        return self.route.backend

    @property
    def tenant(self) -> str:
        return self.key.tenant

    def complete(self, request: GenerateRequest) -> GenerateRequest:
        """`request` with the tenant, labels and switches, and with the policy where the body says nothing."""
        policy = self.policy
        return replace(
            request,
            tenant=self.tenant,
            labels=self.labels,
            speculation=self.speculation,
            store=self.store,
            priority=request.priority or policy.priority or 0,
            deadline_s=policy.deadline_s,
        )


def first_lines(scope: Scope) -> dict[str, str]:
    """The headers by their names in lower case; of a name that comes in several lines, the first."""
    return dict(reversed(Headers(scope=scope).items()))


def upstream_headers(scope: Scope, answer: RequestAnswer, labels: Labels) -> dict[str, str]:
    """The client's headers with the request's id and labels, without a key that is for this gateway.

    A header that comes in several lines is one list (RFC 9110, section 5.3); of our own the first line counts. Raises
    `InvalidRequestError` as `check_query` does.
    """
    check_query(scope)
    given = Headers(scope=scope)
    headers = {name: given[name] if name.startswith(PREFIX) else ", ".join(given.getlist(name)) for name in given}
    headers |= label_headers(labels) | {"x-request-id": answer.request_id}
    if answer.span is not None:
        headers |= trace_headers()
    if answer.has_gateway_key:
        headers = {name: value for name, value in headers.items() if name not in _KEYS}
    return headers


def _labels(headers: Mapping[str, str], fields: Mapping[str, Any]) -> Labels:
    """The labels in our own headers, or else as the client names itself in others; the session also in the body."""
    own = read_labels(headers)
    found = {name: _first(headers[one] for one in names if one in headers) for name, names in _OF_HEADERS.items()}
    labels = {name: getattr(own, name) or label for name, label in found.items()}
    return Labels(**labels | {"session": labels["session"] or _session_of(fields)})


def _first(given: Iterable[Any]) -> str | None:
    """The first that can be a label, or stand for one."""
    return next((label for one in given if (label := _as_label(one)) is not None), None)


def _session_of(fields: Mapping[str, Any]) -> str | None:
    metadata = fields.get("metadata")
    inner: Mapping[str, Any] = metadata if isinstance(metadata, Mapping) else {}
    named = (fields.get("session_id"), inner.get("session_id"), inner.get("thread_id"), fields.get("prompt_cache_key"))
    return _first((*named, inner.get("user_id"), fields.get("previous_response_id")))


def _as_label(given: Any) -> str | None:
    """A client's name as a label: one that no label may be is replaced by its digest."""
    if not isinstance(given, str) or len(given) > MAX_READ or not (name := given.strip()):
        return None
    if len(name) <= MAX_LABEL and name.isprintable():
        return name
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
