"""`POST /tokenize` and `/detokenize`, as vLLM has them: passed to upstreams, answered for models of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.responses import Response

from agentspec.backends.base import TOKENIZE, Tokenization, is_local, tokenization_of
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.errors import ContextLengthError, InvalidRequestError
from agentspec.protocol.requests import parse_chat
from agentspec.protocol.validation import Body, Text, TokenIds
from agentspec.protocol.wire import encode
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.api import respond
from agentspec.proxy.body.amounts import check_amounts
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.endpoint import GatewayEndpoint
from agentspec.proxy.forwarding import StreamInspector
from agentspec.proxy.request_context import RequestContext
from agentspec.runtime import Route

# Fields of a chat that shape its prompt, besides its messages.
_SHAPING = "tools chat_template_kwargs add_generation_prompt continue_final_message reasoning_effort".split()
_OF_CHAT = ("model", "messages", *_SHAPING)
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
    prompt: Text | None = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    reasoning_effort: Any = None
    add_special_tokens: bool | None = None


class _DetokenizeBody(Body):
    model: Text = ""
    tokens: TokenIds | None = None


@dataclass(slots=True)
class TokenizationEndpoint(GatewayEndpoint):
    """Tokens of a prompt, or of a chat's prompt; or the text of tokens. A strategy's are those of its base model."""

    root: ClassVar[str] = ""
    generates: ClassVar[bool] = False

    def _route(self, fields: Mapping[str, Any], strategy: str | None, answer: RequestAnswer) -> Route:
        asked = super(TokenizationEndpoint, self)._route(
            fields, strategy, answer
        )  # slots make the class another object
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
        body = _TokenizeBody.parse(fields)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("send either prompt or messages", param="prompt")
        if body.prompt is not None:
            _refuse_of_chat(body)
            check_characters(len(body.prompt), length, "prompt")
            tokens = await side.tokenize(body.prompt, begins=body.add_special_tokens is not False)
        else:
            chat = {name: fields[name] for name in _OF_CHAT if fields.get(name) is not None}
            request, _ = parse_chat(chat)
            if request.continue_final or not request.start_answer:
                param = "continue_final_message" if request.continue_final else "add_generation_prompt"
                raise InvalidRequestError(
                    f"{param} is not supported here: prompts end ready for an answer", param=param
                )
            text = await side.render(request.messages or (), request.tools, request.template_arguments)
            check_characters(len(text), length, "messages")
            tokens = await side.tokenize(text, begins=bool(body.add_special_tokens))
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
            raise InvalidRequestError("tokens holds an id that the model has not", param="tokens") from None


def _refuse_of_chat(body: _TokenizeBody) -> None:
    """Raise `InvalidRequestError` for a field that shapes a chat's prompt, next to a prompt that is whole already."""
    for name in _SHAPING:
        if getattr(body, name) not in (None, []):
            raise InvalidRequestError(f"{name} needs messages: a prompt is read as it is", param=name)
