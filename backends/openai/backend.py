"""The backend of an OpenAI-compatible endpoint: generates answers as deltas, or forwards requests unchanged."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import replace
from types import NoneType
from typing import Any
from urllib.parse import quote

from agentspec.backends.base import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, Capabilities
from agentspec.backends.http import MAX_ANSWER_BYTES, MAX_LIST_BYTES, Endpoint, Room, Transport, UpstreamResponse
from agentspec.backends.http.response import decode_json, status_error
from agentspec.backends.openai.fields import (
    GOAL,
    PRIORITY,
    SESSION,
    goal_fields,
    label_fields,
    labels_in,
    prediction_fields,
    priority_fields,
    session_fields,
    switch_fields,
    takes_switches,
    token_id_fields,
)
from agentspec.backends.openai.isolation import SALT, SGLANG_KEY, TenantIsolation, chosen_salt, is_harmless
from agentspec.backends.openai.payload import payload
from agentspec.backends.openai.probe import ProbeReport, probe
from agentspec.backends.openai.server_kind import ServerDetector, ServerKind
from agentspec.backends.openai.tokenization import ServerTokenization
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamError, UpstreamIsolationError
from agentspec.protocol.deltas import CallNumbers, merged, to_delta
from agentspec.protocol.headers import label_headers, policy_of, read_labels, switched_off
from agentspec.protocol.wire import SseDecoder
from agentspec.types import DEFAULT_TENANT, Delta, GenerateRequest, Labels

logger = logging.getLogger(__name__)

MAX_CHOICE_BYTES = 16 << 20  # of a whole answer with one choice
INLINE_BYTES = 1 << 16  # an answer up to this size is parsed on the loop
_SAID = ("prediction", GOAL, PRIORITY)  # fields of requests that some servers are sent in another form
_LABELLED = (CHAT, COMPLETIONS, RESPONSES)  # where vLLM accepts salts and arguments besides OpenAI's


class OpenAIBackend:
    """An OpenAI-compatible endpoint. Stateless apart from its connections; safe to use from several event loops.

    Errors call the endpoint `name`; without a name, by its address. The API key comes from the settings or a key file
    and appears in no `repr`, message or log. `address` is the one to connect to, if the URL's host has several.
    Raises `ConfigurationError` when the key file cannot be read.
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
        self._endpoint = Endpoint(settings, name=name, transport=transport, address=address)
        self._detector = ServerDetector(self._endpoint, settings)
        self._isolation: TenantIsolation | None = None
        self._most_tokens: int | None = None
        self._capabilities = Capabilities(logprobs=True, continue_final=True)
        self._tokenization: ServerTokenization | None = None

    def __repr__(self) -> str:
        return f"OpenAIBackend({self._endpoint!r})"

    @property
    def capabilities(self) -> Capabilities:
        """Assumed abilities until `probe` has found out the upstream's real ones."""
        return self._capabilities

    @property
    def endpoint(self) -> Endpoint:
        """The way to the server."""
        return self._endpoint

    @property
    def tokenization(self) -> ServerTokenization | None:
        """The server's tokenizer, if `probe` has found that the server has tokenizer endpoints."""
        return self._tokenization

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Stream the answer to `request`, sent with its model name, or with the settings' if it has none.

        A request to a server that is known to send token ids also asks for them, and one to vLLM carries the labels.
        The delta with the finish reason is held back until the usage is known.

        Raises `UpstreamStatusError` for an error answer, `UpstreamTimeoutError`, and `UpstreamError` for any other
        failure: also for a stream that ends without a finish reason, so that a cut answer never looks complete.
        """
        path, body = payload(self._limited(request), request.model or self.settings.model or "")
        if self._capabilities.token_ids or await self._detector.is_vllm():
            body |= token_id_fields(body)
        if request.priority and self.settings.priority != "off":
            body[PRIORITY] = request.priority
        goal = request.latency_target_ms_per_token
        asked = body if goal is None else body | {GOAL: goal}
        off = switched_off(store=request.store, speculation=request.speculation)
        body |= await self.body_fields(path, request.tenant, request.labels, asked, off)
        labels = self._own_labels(request.tenant, request.labels)
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream, application/json",
            **label_headers(labels, speculation=request.speculation, store=request.store, prefill=request.prefill_next),
            **policy_of(request).headers(),
        }
        told = self._session_headers(labels)
        async with (
            self._endpoint.send("POST", path, headers=headers, body=_encode(body), told=told) as response,
            aclosing(self.deltas(response)) as deltas,
        ):
            async for delta in deltas:
                yield delta

    async def deltas(self, response: UpstreamResponse, room: Room | None = None) -> AsyncGenerator[Delta]:
        """The answer in `response`, streamed or whole, of about `MAX_ANSWER_BYTES`. Raises as `generate` does.

        `room` is asked as by `UpstreamResponse.aread`, for one that is whole.
        """
        last: Delta | None = None
        calls, size = CallNumbers(), 0
        async with aclosing(self._chunks(response, room)) as chunks:
            async for chunk in chunks:
                delta = calls.numbered(to_delta(chunk))
                size += delta.size
                if size > MAX_ANSWER_BYTES:
                    message = f"upstream {self._endpoint.name} answered with more than {MAX_ANSWER_BYTES} bytes"
                    raise UpstreamError(message)
                if last is not None:
                    last = merged(last, delta)
                elif delta.finish_reason is not None:
                    last = delta
                else:
                    yield delta
        if last is None or last.finish_reason == "cancelled":
            raise UpstreamError(f"upstream {self._endpoint.name} ended the answer before it was finished")
        yield last

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
        """Forward a request byte for byte to `path` below the base URL, or, `above`, beside its /v1; the caller
        allow-lists paths.

        With several tenants, request ids and the names of sessions and workflows in `headers` (lower case) are made the
        tenant's own. Error answers are returned like others, with status and body. Leaving the block cancels the
        upstream's work. Raises `UpstreamError` if nothing answers, and for redirects.
        """
        labels = self._own_labels(tenant, read_labels(headers))
        told = self._session_headers(labels)
        if self._isolation is not None and self._isolation.required:
            headers = self._isolation.headers(tenant, headers) | label_headers(labels)
        return self._endpoint.send(method, path, headers=headers, body=body, query=query, told=told, above=above)

    def limit(self, max_tokens: int) -> None:
        """Ask for at most `max_tokens` tokens in one answer from now on; `forward` sends what it is given."""
        self._most_tokens = max_tokens

    def isolate(self, isolation: TenantIsolation) -> None:
        """Keep tenants apart from now on, unless the settings let them share this upstream."""
        self._isolation = isolation

    async def check_isolation(self) -> None:
        """Raises `ConfigurationError` if the upstream could not keep several tenants apart, and may not be shared.

        One that does not answer now is asked again by each request.
        """
        kind = "vllm" if self.settings.shared_upstream else await self._detector.kind()
        if kind is None:
            logger.warning(
                "upstream %s does not answer: until it does, requests to it are refused", self._endpoint.name
            )
        if kind == "other":
            raise ConfigurationError(
                f"upstream {self._endpoint.name} is neither vLLM nor SGLang, so it cannot keep the caches of several"
                ' tenants apart: set shared_upstream = true for it if they may share them, or server_kind = "vllm" or'
                ' "sglang" if it is one that hides it'
            )

    async def body_fields(
        self, path: str, tenant: str, labels: Labels, given: Mapping[str, Any], off: Collection[str] = ()
    ) -> dict[str, Any]:
        """The fields to set in a body for `path`, which already has the fields `given`.

        A vLLM server is sent the labels and the tokens of a prediction, one with our drafter the latency goal, one that
        knows sessions the session's name, one that schedules by priority the client's on its own scale, if the settings
        allow it; vLLM and SGLang what is switched `off`, and with several tenants a salt for each, while names of
        sessions and workflows are made the tenant's own. May wait until the upstream is recognised. Raises
        `UpstreamIsolationError` if it is neither, `InvalidRequestError` for a salt or goal that is none.
        """
        salts = await self._salts(tenant, given)
        if path not in _LABELLED:
            return salts
        sent = labels
        if self._apart:
            own = labels_in(given)
            named = Labels(labels.session or own.session, labels.workflow or own.workflow, labels.step)
            sent = self._apart.labels(tenant, named)
            if not isinstance(given.get(SESSION), (str, NoneType)):
                raise InvalidRequestError(f"{SESSION} must be a string", param=SESSION)
        if not (off or sent != Labels() or any(given.get(name) is not None for name in _SAID)):
            return salts
        kind = await self._detector.kind()
        fields = salts | (await self._vllm_fields(sent, given) if kind == "vllm" else {})
        session = self._own_labels(tenant, labels).session
        if given.get(SESSION) and not self._apart:
            session = None  # the client's own stays
        fields |= session_fields(kind, session, given) | priority_fields(self.settings, kind, given)
        return fields | (switch_fields(kind, path, off, {**given, **fields}) if off else {})

    async def _vllm_fields(self, sent: Labels, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields for our drafter in a vLLM server: the labels, the prediction and the latency goal."""
        fields = label_fields(sent, given)
        if given.get("prediction") is not None:
            model = self.settings.model or str(given.get("model"))
            fields |= await prediction_fields(self._endpoint, model, {**given, **fields})
        if given.get(GOAL) is not None and await self._detector.keeps_latency():
            fields |= goal_fields({**given, **fields})
        return fields

    @property
    def needs_salt(self) -> bool:
        """Whether requests must carry a salt, which only chats, completions, responses and embeddings can."""
        return self._apart is not None

    async def has_route(self, path: str, headers: Mapping[str, str], off: Collection[str] = ()) -> bool:
        """Whether requests to `path` can be forwarded: the upstream has the route, and needs no salt there that the
        route cannot carry; nor one of the switches `off` that vLLM or SGLang could be told at another one.
        """
        kind = await self._detector.kind() if off else None
        if takes_switches(kind, CHAT) and not takes_switches(kind, path):
            return False
        return (self._apart is None or path in _LABELLED) and await self._detector.has_route(path, headers)

    async def server_kind(self) -> ServerKind | None:
        """What the upstream is; None if it has never answered."""
        return await self._detector.kind()

    async def keeps_latency(self, path: str) -> bool:
        """Whether the upstream's drafts serve latency goals first: it runs our drafter, and can be told them there."""
        return path in _LABELLED and await self._detector.keeps_latency()

    def tokenizer_of(self, model: str) -> ServerTokenization:
        """vLLM's tokenizer endpoints for `model`, whether the upstream has them or not."""
        return ServerTokenization(self._endpoint, model)

    async def models(self, headers: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """The upstream's own model list; `headers` may carry a client's key. Raises as `generate` does."""
        async with self._endpoint.send("GET", "/models", headers=headers or {}) as response:
            answer = decode_json(await self._checked(response, MAX_LIST_BYTES), self._endpoint.name)
        listed = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(listed, list):
            raise UpstreamError(f"upstream {self._endpoint.name} answered /models without a list")
        return [model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]

    async def probe(self, timeout: float = 10.0) -> ProbeReport:
        """Find out by requests of one token what the upstream can do. Never raises; see `ProbeReport.error`.

        `timeout` bounds each phase of each try in seconds. Updates `capabilities` and `tokenization`.
        """
        report = await probe(self._endpoint, self.settings, timeout)
        if report.answers:
            self._capabilities = Capabilities(
                token_ids=report.token_ids,
                continue_final=report.continue_final,
                logprobs=report.logprobs,
                context_length=report.context_length,
            )
            model = self.settings.model or report.models[0]
            self._tokenization = ServerTokenization(self._endpoint, model) if report.tokenizes else None
        return report

    async def embed(self, texts: Sequence[str], model: str, tenant: str = DEFAULT_TENANT) -> list[list[float]]:
        """One vector for each text. Raises as `generate` does. A long answer is parsed in a thread."""
        given = {"model": model, "input": list(texts), "encoding_format": "float"}
        body = _encode(given | await self.body_fields(EMBEDDINGS, tenant, Labels(), given))
        answer = await self._endpoint.fetch("POST", EMBEDDINGS, body=body)
        try:
            if len(answer) <= INLINE_BYTES:
                return vectors(answer, len(texts))
            return await asyncio.to_thread(vectors, answer, len(texts))
        except (KeyError, TypeError, ValueError, RecursionError):
            raise UpstreamError(f"upstream {self._endpoint.name} answered /embeddings without vectors") from None

    async def aclose(self) -> None:
        await self._endpoint.aclose()

    async def leave_loop(self) -> None:
        """Close the connections of the running loop, which is about to end; connections of other loops stay."""
        await self._endpoint.leave_loop()

    def _limited(self, request: GenerateRequest) -> GenerateRequest:
        asked, most = request.sampling.max_tokens, self._most_tokens
        if asked is None or most is None or asked <= most:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    @property
    def _apart(self) -> TenantIsolation | None:
        """How to keep tenants apart here; None if there is no need to."""
        isolation = self._isolation
        return isolation if isolation and isolation.required and not self.settings.shared_upstream else None

    def _own_labels(self, tenant: str, labels: Labels) -> Labels:
        return self._apart.labels(tenant, labels) if self._apart else labels

    def _session_headers(self, labels: Labels) -> dict[str, str]:
        """The header by which SGLang's router holds the session in `labels`, which are the tenant's, on one server."""
        if labels.session is None or self._detector.known != "sglang":
            return {}
        return {"x-smg-routing-key": quote(labels.session, safe=" !#$&'()*+,/:;=?@[]")}

    async def _salts(self, tenant: str, given: Mapping[str, Any]) -> dict[str, Any]:
        if self._isolation is None or not (self._apart or given.get(SALT)):
            return {}
        kind = await self._detector.kind()
        if kind not in ("vllm", "sglang"):
            if self._apart:
                raise UpstreamIsolationError(
                    f"upstream {self._endpoint.name} is not known to be vLLM or SGLang now, so it cannot keep the"
                    " caches of several tenants apart; try again later, or let the operator set shared_upstream for it"
                )
            return {}
        names = (SALT, SGLANG_KEY) if kind == "sglang" and self._apart else (SALT,)
        chosen = [chosen_salt(given, name) for name in names]
        if not self._apart and (chosen[0] is None or is_harmless(chosen[0])):
            return {}
        salted: dict[str, Any] = {SALT: self._isolation.salt(tenant, *chosen)}
        if chosen[1:] not in ([], [None]):
            salted[SGLANG_KEY] = None  # it is part of the salt now
        return salted

    async def _chunks(self, response: UpstreamResponse, room: Room | None) -> AsyncGenerator[Any]:
        """The JSON of each event, or the whole JSON body if the upstream does not stream."""
        if response.status >= 400 or not response.is_stream:
            yield decode_json(await self._checked(response, MAX_CHOICE_BYTES, room), self._endpoint.name)
            return
        if response.is_encoded:
            raise UpstreamError(f"upstream {self._endpoint.name} sent a compressed stream, which was not asked for")
        decoder = SseDecoder()
        async with aclosing(response.aiter_raw()) as pieces:
            async for piece in pieces:
                for data in decoder.feed(piece):
                    if data == "[DONE]":
                        return
                    yield decode_json(data.encode(), self._endpoint.name)
        for data in decoder.finish():
            with suppress(UpstreamError):  # half an event, or [DONE]; what the answer lacks is found by who reads it
                yield decode_json(data.encode(), self._endpoint.name)

    async def _checked(self, response: UpstreamResponse, limit: int, room: Room | None = None) -> bytes:
        body = await response.aread(limit, room)
        if response.status >= 400:
            error = status_error(self._endpoint.name, response.status, body, response.headers)
            error.own_key = response.own_key
            raise error
        return body


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def vectors(answer: bytes, count: int) -> list[list[float]]:
    """The `count` vectors of an answer to /embeddings, all of one length.

    Raises KeyError, TypeError, ValueError or RecursionError for what is no such answer.
    """
    data = json.loads(answer)["data"]
    if not isinstance(data, list):
        raise TypeError("data is no array")
    found = [[float(number) for number in item["embedding"]] for item in data]
    if len(found) != count or len({len(vector) for vector in found}) > 1 or not all(found):
        raise ValueError("there are other vectors than were asked for")
    if not all(math.isfinite(sum(vector)) for vector in found):
        raise ValueError("a vector holds what is no number")
    return found
