"""`POST /tokenize` and `/detokenize`, as vLLM has them, and the counts of a prompt's tokens: by upstreams that have
these routes, and for models of this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.exceptions import HTTPException
from starlette.responses import Response

from agentspec.backends.base import MESSAGES, TOKENIZE, Backend, Tokenization, is_local, tokenization_of
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.errors import ContextLengthError, InvalidRequestError, UpstreamStatusError
from agentspec.protocol.requests import parse_chat
from agentspec.protocol.validation import Body, Text, TokenIds
from agentspec.protocol.wire import encode
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.answering import asked_fields, parse_here, read_history, require_route
from agentspec.proxy.api import json_response, respond
from agentspec.proxy.body.amounts import check_amounts
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.completions.translation import TEMPLATED
from agentspec.proxy.endpoint import GatewayEndpoint, GenerationEndpoint
from agentspec.proxy.forwarding import StreamInspector
from agentspec.proxy.request_context import RequestContext
from agentspec.runtime import Route
from agentspec.types import Message

TOKENIZED_CHARACTERS = 1_000_000
CHARACTERS_PER_TOKEN = 16  # no text of a language has so many


def check_characters(length: int, context_length: int | None, param: str) -> None:
    """Raise `ContextLengthError` for a text of so many characters that tokenizing it would only cost memory.

    A token takes about 170 bytes while a text is tokenized.
    """
    most = max(TOKENIZED_CHARACTERS, CHARACTERS_PER_TOKEN * (context_length or 0))
    if length > most:
        message = f"the text has {length} characters; at most {most} are tokenized here: send it in pieces"
        raise ContextLengthError(message, param=param)


class _TokenizeBody(Body):
    model: Text = ""
    prompt: Text = ""
    add_special_tokens: bool | None = None


class _DetokenizeBody(Body):
    model: Text = ""
    tokens: TokenIds | None = None


@dataclass(slots=True)
class TokenizationEndpoint(GatewayEndpoint):
    """Tokens of a prompt, or of a chat's prompt; or the text of tokens. A strategy's are those of its base model."""

    root: ClassVar[str] = ""
    generates: ClassVar[bool] = False

    def _route(self, fields: Mapping[str, Any], answer: RequestAnswer) -> Route:
        asked = super(TokenizationEndpoint, self)._route(fields, answer)  # slots make the class another object
        return asked if isinstance(asked.backend, OpenAIBackend) else self.services.runtime.base_of(fields["model"])

    async def respond(self, context: RequestContext, body: RequestBody, answer: RequestAnswer) -> None:
        backend = context.route.backend
        if isinstance(backend, OpenAIBackend):
            await self.check(context, body)
            await self.pass_on(context, body, answer, StreamInspector(0), above=True)
            return
        side = tokenization_of(backend)
        if side is None:
            raise InvalidRequestError(f"the model {answer.model!r} shows no tokenizer", param="model")
        check_amounts(body.fields, self.path, self.services.settings)
        async with context.deadline.limit():
            if self.path == TOKENIZE:
                length = backend.capabilities.context_length
                found = {**await self._tokenize(side, body.fields, length), "max_model_len": length}
            else:
                found = await self._detokenize(side, body.fields)
        encoded = await body.work(encode, found)  # token ids take longer to write than their text to read
        await respond(answer, Response(encoded, media_type="application/json"))

    async def _tokenize(self, side: Tokenization, fields: Mapping[str, Any], length: int | None) -> dict[str, Any]:
        if (fields.get("prompt") is None) == (fields.get("messages") is None):
            raise InvalidRequestError("send either prompt or messages", param="prompt")
        if fields.get("prompt") is not None:
            body = _TokenizeBody.parse(fields)
            check_characters(len(body.prompt), length, "prompt")
            tokens = await side.tokenize(body.prompt, begins=body.add_special_tokens is not False)
        else:
            request, _ = parse_chat({name: fields[name] for name in fields if name != "add_special_tokens"})
            if request.continue_final or not request.start_answer:
                param = "continue_final_message" if request.continue_final else "add_generation_prompt"
                raise InvalidRequestError(
                    f"{param} is not supported here: prompts end ready for an answer", param=param
                )
            text = await side.render(request.messages or (), request.tools, request.template_arguments)
            check_characters(len(text), length, "messages")
            tokens = await side.tokenize(text, begins=bool(fields.get("add_special_tokens")))
        return {"count": len(tokens), "tokens": tokens}

    async def _detokenize(self, side: Tokenization, fields: Mapping[str, Any]) -> dict[str, Any]:
        body = _DetokenizeBody.parse(fields)
        if body.tokens is None:
            raise InvalidRequestError("tokens is missing", param="tokens")
        try:
            # With special tokens where the backend can write them out, so that it gives them again.
            spell = side.spell if is_local(side, "spell") else side.detokenize
            return {"prompt": await spell(list(body.tokens))}
        except (IndexError, OverflowError, TypeError):  # a tokenizer that looks ids up
            raise InvalidRequestError("tokens has an id beyond the model's vocabulary", param="tokens") from None


@dataclass(slots=True)
class CountTokensEndpoint(GenerationEndpoint):
    """Counts the tokens of an API's prompt; a strategy's by its base model. `form` is the rest of the answer."""

    generates: ClassVar[bool] = False
    form: Mapping[str, str]

    async def answer_itself(self, context: RequestContext, body: RequestBody, answer: RequestAnswer) -> None:
        backend = context.route.backend
        fields = asked_fields(body, answer, self.services.settings)
        fields = {"max_tokens": 1, **fields} if self.api.path == MESSAGES else fields
        history = await read_history(self.api, self.services.keeper, context, body)
        async with context.deadline.limit():
            if isinstance(backend, OpenAIBackend):
                assert self.api.translate is not None
                templated = await backend.server_kind() in TEMPLATED
                chat, _ = await body.work(self.api.translate, fields, context, history, templated)
                shown = chat["messages"], chat.get("tools") or (), chat.get("chat_template_kwargs") or {}
                begun = "continue_final_message" in chat
                count = await _counted(backend, context.route.upstream_model, *shown, begun=begun)
            else:
                require_route(self.api, backend, answer)
                settings = self.services.settings
                [request], _ = await body.work(parse_here, self.api, fields, context, history, settings)
                base = await self._base_of(fields["model"])
                shown = request.messages or (), request.tools, request.template_arguments
                count = await _counted(base.backend, base.upstream_model, *shown, begun=request.continue_final)
        await respond(answer, json_response({**self.form, "input_tokens": count}))

    async def _base_of(self, model: str) -> Route:
        """The route of a plain model, or of a strategy's base model; of a pool, that of one of its servers."""
        route = self.services.runtime.base_of(model)
        if not isinstance(route.backend, PoolBackend):
            return route
        backend, known = await route.backend.any_server()
        return Route(route.backend_name, backend, known or route.upstream_model)


async def _counted(backend: Backend, model: str, messages: Sequence[Message], *shown: Any, begun: bool) -> int:
    """The tokens of messages, of which the last may have `begun` the answer, tools and template arguments: of an
    upstream by vLLM's endpoints. Raises 404 without.
    """
    messages, beginning = (messages[:-1], messages[-1]["content"]) if begun else (messages, "")
    if isinstance(backend, OpenAIBackend):
        side = backend.tokenizer_of(model)
        try:
            count = len(await side.rendered_ids(messages, *shown))
            return count + (len(await side.tokenize(beginning)) if beginning else 0)
        except UpstreamStatusError as error:
            if error.status in (404, 405, 501):
                raise HTTPException(404) from None
            raise
    if not isinstance(backend, Tokenization):
        raise HTTPException(404)
    # Tools that the model's template cannot take are refused as for an answer.
    text = await backend.render(messages, *shown) + beginning
    check_characters(len(text), backend.capabilities.context_length, "messages")
    return len(await backend.tokenize(text))
