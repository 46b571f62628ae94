"""`POST /v1/messages/count_tokens`: by the model's own chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.exceptions import HTTPException

from agentspec.backends.base import Backend, Tokenization
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.errors import UpstreamStatusError
from agentspec.protocol.anthropic.requests import MessagesRequest, parse_messages
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.answering import check_roles, require_route
from agentspec.proxy.api import json_response, respond
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.completions.translation import TEMPLATED
from agentspec.proxy.endpoint import GenerationEndpoint
from agentspec.proxy.messages.api import MessagesInspector, chat_of, read_for_upstream
from agentspec.proxy.request_context import RequestContext
from agentspec.proxy.routes.tokenization import check_characters
from agentspec.runtime import Route
from agentspec.types import GenerateRequest


@dataclass(slots=True)
class CountTokensEndpoint(GenerationEndpoint):
    """Counts a prompt's tokens; a strategy's by its base model. An upstream with the route counts itself."""

    generates: ClassVar[bool] = False

    async def respond(self, context: RequestContext, body: RequestBody, answer: RequestAnswer) -> None:
        backend = context.route.backend
        if isinstance(backend, OpenAIBackend):
            await self.check(context, body)
            if await self.is_forwarded(context, answer):
                await self.pass_on(context, body, answer, MessagesInspector())
                return
        async with context.deadline.limit():
            count = await self._count(context, body, answer, backend)
        await respond(answer, json_response({"input_tokens": count}))

    async def _count(self, context: RequestContext, body: RequestBody, answer: RequestAnswer, backend: Backend) -> int:
        if isinstance(backend, OpenAIBackend):
            templated = await backend.server_kind() in TEMPLATED
            parsed = await body.work(lambda: read_for_upstream(body.fields, templated, count=True))
            return await _of_server(backend, context.route.upstream_model, parsed)
        require_route(self.api, backend, answer)
        parsed = await body.work(self._read_here, body.fields, backend)
        base = await self._base_of(body.fields["model"])
        if isinstance(base.backend, OpenAIBackend):
            return await _of_server(base.backend, base.upstream_model, parsed)
        if not isinstance(base.backend, Tokenization):
            raise HTTPException(404)
        request = await body.work(chat_of, parsed)
        return await _of_model(base.backend, request, base.backend.capabilities.context_length)

    def _read_here(self, fields: Mapping[str, Any], backend: Backend) -> MessagesRequest:
        check_roles(fields, self.path, backend, self.services.settings)
        return parse_messages(fields, count=True)

    async def _base_of(self, model: str) -> Route:
        """The route of a plain model, or of a strategy's base model; of a pool, that of one of its servers."""
        route = self.services.runtime.base_of(model)
        if not isinstance(route.backend, PoolBackend):
            return route
        backend, known = await route.backend.any_server()
        return Route(route.backend_name, backend, known or route.upstream_model)


async def _of_model(base: Tokenization, request: GenerateRequest, context_length: int | None) -> int:
    """By a model of this process. Tools that its template cannot take are refused as for an answer."""
    text = await base.render(request.messages or (), request.tools, request.template_arguments)
    check_characters(len(text), context_length, "messages")
    return len(await base.tokenize(text))


async def _of_server(backend: OpenAIBackend, model: str, parsed: MessagesRequest) -> int:
    """By the tokenizer endpoints of an upstream, as vLLM has them. Raises 404 for one without."""
    chat = parsed.chat
    arguments = (chat["messages"], chat.get("tools") or (), chat.get("chat_template_kwargs") or {})
    try:
        return len(await backend.tokenizer_of(model).rendered_ids(*arguments))
    except UpstreamStatusError as error:
        if error.status in (404, 405, 501):
            raise HTTPException(404) from None
        raise
