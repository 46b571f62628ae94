"""The backend of an OpenAI-compatible endpoint, which generates answers as deltas."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import fields, replace
from typing import Any

from agentspec.backends.base import Capabilities
from agentspec.backends.http import MAX_LIST_BYTES, Room, UpstreamResponse, decode_json
from agentspec.backends.http.errors import status_error
from agentspec.backends.http.response import MAX_ANSWER_BYTES
from agentspec.backends.openai.fields import PRIORITY, token_id_fields
from agentspec.backends.openai.probe import ProbeReport, probe
from agentspec.backends.openai.tokenization import ServerTokenization
from agentspec.backends.openai.upstream import Upstream
from agentspec.errors import InvalidRequestError, UpstreamError
from agentspec.protocol.deltas import merged, to_delta
from agentspec.protocol.headers import label_headers, switched_off
from agentspec.protocol.policy import policy_of
from agentspec.protocol.tools import CallNumbers
from agentspec.protocol.wire import SseDecoder
from agentspec.telemetry.tracing import trace_headers
from agentspec.types import Delta, GenerateRequest, SamplingParams, StructuredOutputs

logger = logging.getLogger(__name__)

MAX_CHOICE_BYTES = 16 << 20  # of a whole answer with one choice


class OpenAIBackend(Upstream):
    """An OpenAI-compatible endpoint that also answers requests of this process. Stateless apart from its connections;
    safe to use from several event loops.
    """

    _most_tokens: int | None = None
    capabilities = Capabilities(logprobs=True, continue_final=True)
    """Assumed abilities until `probe` has found out the upstream's real ones."""
    tokenization: ServerTokenization | None = None
    """The server's tokenizer, if `probe` has found that the server has tokenizer endpoints."""

    def __repr__(self) -> str:
        return f"OpenAIBackend({self.endpoint!r})"

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Stream the answer to `request`, sent with its model name, or with the settings' if it has none.

        A request to a server that is known to send token ids also asks for them, and one to vLLM carries the labels.
        The delta with the finish reason is held back until the usage is known.

        Raises `UpstreamStatusError` for an error answer, `UpstreamTimeoutError`, and `UpstreamError` for any other
        failure: also for a stream that ends without a finish reason, so that a cut answer never looks complete.
        """
        path, body = payload(self._limited(request), request.model or self.settings.model or "")
        if self.capabilities.token_ids or await self._detector.is_vllm():
            body |= token_id_fields(body)
        if request.priority and self.settings.priority != "off":
            body[PRIORITY] = request.priority
        off = switched_off(store=request.store, share=request.share, speculation=request.speculation)
        body |= await self.body_fields(path, request.tenant, request.labels, body, off)
        labels = self._own_labels(request.tenant, request.labels)
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream, application/json",
            **label_headers(
                labels,
                speculation=request.speculation,
                store=request.store,
                early_tools=request.early_tools,
            ),
            **policy_of(request).headers(),
            **trace_headers(),
        }
        added = self._session_headers(labels)
        encoded = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        async with (
            self.endpoint.send("POST", path, headers=headers, body=encoded, added=added) as response,
            aclosing(self.deltas(response)) as deltas,
        ):
            async for delta in deltas:
                yield delta

    async def deltas(self, response: UpstreamResponse, room: Room | None = None) -> AsyncGenerator[Delta]:
        """The answer in `response`, streamed or whole, of about `MAX_ANSWER_BYTES`. Raises as `generate` does.

        `room` is asked as by `UpstreamResponse.aread`, for a whole answer.
        """
        last: Delta | None = None
        calls, size = CallNumbers(), 0
        async with aclosing(self._chunks(response, room)) as chunks:
            async for chunk in chunks:
                delta = calls.numbered(to_delta(chunk))
                size += delta.size
                if size > MAX_ANSWER_BYTES:
                    message = f"upstream {self.endpoint.name} answered with more than {MAX_ANSWER_BYTES} bytes"
                    raise UpstreamError(message)
                if last is not None:
                    last = merged(last, delta)
                elif delta.finish_reason is not None:
                    last = delta
                else:
                    yield delta
        if last is None or last.finish_reason == "cancelled":
            raise UpstreamError(f"upstream {self.endpoint.name} ended the answer before it was finished")
        yield last

    def limit(self, max_tokens: int) -> None:
        """Ask for at most `max_tokens` tokens in one answer from now on; `forward` sends bodies as they are."""
        self._most_tokens = max_tokens

    async def models(self, headers: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """The upstream's own model list; `headers` may carry a client's key. Raises as `generate` does."""
        async with self.endpoint.send("GET", "/models", headers=headers or {}) as response:
            answer = decode_json(await self._checked(response, MAX_LIST_BYTES), self.endpoint.name)
        listed = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(listed, list):
            raise UpstreamError(f"upstream {self.endpoint.name} answered /models without a list")
        return [model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]

    async def probe(self, timeout: float = 10.0) -> ProbeReport:
        """Find out by requests of one token what the upstream can do. Never raises; see `ProbeReport.error`.

        `timeout` bounds each phase of each try in seconds. Updates `capabilities` and `tokenization`.
        """
        report = await probe(self.endpoint, self.settings, timeout)
        if report.answers:
            self.capabilities = Capabilities(
                token_ids=report.token_ids,
                continue_final=report.continue_final,
                logprobs=report.logprobs,
                context_length=report.context_length,
            )
            model = self.settings.model or report.models[0]
            self.tokenization = ServerTokenization(self.endpoint, model) if report.tokenizes else None
        return report

    def _limited(self, request: GenerateRequest) -> GenerateRequest:
        asked, most = request.sampling.max_tokens, self._most_tokens
        if asked is None or most is None or asked <= most:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    async def _chunks(self, response: UpstreamResponse, room: Room | None) -> AsyncGenerator[Any]:
        """The JSON of each event, or the whole JSON body if the upstream does not stream."""
        if response.status >= 400 or not response.is_stream:
            yield decode_json(await self._checked(response, MAX_CHOICE_BYTES, room), self.endpoint.name)
            return
        if response.is_encoded:
            raise UpstreamError(f"upstream {self.endpoint.name} sent a compressed stream, though none was requested")
        decoder = SseDecoder()
        async with aclosing(response.aiter_raw()) as pieces:
            async for piece in pieces:
                for data in decoder.feed(piece):
                    if data == "[DONE]":
                        return
                    yield decode_json(data.encode(), self.endpoint.name)
        for data in decoder.finish():
            with suppress(UpstreamError):  # half an event, or [DONE]; the caller notices what the answer lacks
                yield decode_json(data.encode(), self.endpoint.name)

    async def _checked(self, response: UpstreamResponse, limit: int, room: Room | None = None) -> bytes:
        body = await response.aread(limit, room)
        if response.status >= 400:
            error = status_error(self.endpoint.name, response.status, body, response.headers)
            error.own_key = response.own_key
            raise error
        return body


def payload(request: GenerateRequest, model: str) -> tuple[str, dict[str, Any]]:
    """The path and the body of `request`, which ask for a stream with usage.

    Sampling fields that were not given are left out, so that the upstream's own defaults apply. `extra` is merged in
    but cannot change the fields set here. Raises `InvalidRequestError` for `n` above 1: a delta cannot carry it.
    """
    choices = request.extra.get("n", request.sampling.n)
    if choices not in (None, 1):
        raise InvalidRequestError(
            f"n must be 1, not {choices!r}: an endpoint is asked for one answer at a time", param="n"
        )
    chat = request.messages is not None
    body = dict(request.extra)
    body |= _sampling(request.sampling, chat=chat)
    body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if chat:
        body["messages"] = [dict(message) for message in request.messages or ()]
    else:
        body["prompt"] = request.text if request.text is not None else list(request.token_ids or ())
    if request.continue_final:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    body |= _chat(request) if chat else {}
    if request.return_prompt:
        body["return_token_ids"] = True
    return "/chat/completions" if chat else "/completions", body


def _chat(request: GenerateRequest) -> dict[str, Any]:
    """The fields that only chat requests have; defaults are left out."""
    body: dict[str, Any] = {}
    if not (request.start_answer or request.continue_final):
        body["add_generation_prompt"] = False
    if request.tools:
        choice: Any = request.tool_choice
        if choice not in ("auto", "none", "required"):
            choice = {"type": "function", "function": {"name": choice}}
        body |= {"tools": [dict(tool) for tool in request.tools], "tool_choice": choice}
        body |= {} if request.parallel_tool_calls else {"parallel_tool_calls": False}
    if request.template_arguments:
        body["chat_template_kwargs"] = dict(request.template_arguments)
    return body


def _form(form: StructuredOutputs) -> dict[str, Any]:
    """A structured output in the body: JSON forms in OpenAI's fields, other forms in vLLM's."""
    if form.json_object:
        return {"response_format": {"type": "json_object"}}
    if isinstance(form.json, Mapping):
        described = {"name": "answer", "schema": dict(form.json)}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    return {"structured_outputs": form.given}


def _sampling(sampling: SamplingParams, *, chat: bool) -> dict[str, Any]:
    apart = ("logprobs", "top_logprobs", "structured_outputs")
    names = [field.name for field in fields(sampling) if field.name not in apart]
    body = {name: getattr(sampling, name) for name in names if sampling.is_given(name)}
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs:
        body |= (
            {"logprobs": True, "top_logprobs": sampling.top_logprobs} if chat else {"logprobs": sampling.top_logprobs}
        )
    if sampling.structured_outputs is not None:
        body |= _form(sampling.structured_outputs)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in body.items()}
