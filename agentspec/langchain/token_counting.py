"""Tokens of texts and prompts by a model's own tokenizer, in this process or behind its server's `/tokenize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from langchain_core.messages import BaseMessage, get_buffer_string

from agentspec.backends.base import Tokenization
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.tokenization import ServerTokenization
from agentspec.backends.pool.backend import PoolBackend
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamStatusError
from agentspec.runtime import Runtime
from agentspec.types import GenerateRequest

_NO_ROUTE = (404, 405, 501)
_REFUSED = (400, 422)


async def token_ids(runtime: Runtime, model: str, text: str) -> list[int]:
    """Token ids of `text` as a part of a prompt. Raises `ConfigurationError` for a server that has no tokenizer to ask,
    and what the runtime and an upstream raise.
    """
    side = await _tokenization(runtime, model)
    try:
        return await side.tokenize(text)
    except UpstreamStatusError as error:
        raise _explained(error) from error


async def prompt_length(runtime: Runtime, request: GenerateRequest, messages: Sequence[BaseMessage]) -> int:
    """How many tokens the prompt of `request`, a chat of `messages`, has, ready for the answer. Raises as `token_ids`.

    A chat template may refuse messages that are only a part of a chat, as those that LangChain's `trim_messages` asks
    for are. Each then counts as a message of the user's, which is a little more than it is.
    """
    if not messages:
        return 0
    side = await _tokenization(runtime, request.model)
    try:
        return await _rendered_length(side, request)
    except (InvalidRequestError, UpstreamStatusError) as error:
        if isinstance(error, UpstreamStatusError) and error.status not in _REFUSED:
            raise _explained(error) from error
    whole = replace(request, messages=[_asked(get_buffer_string(messages))])
    empty = replace(request, messages=[_asked("")], tools=())
    return await _rendered_length(side, whole) + (len(messages) - 1) * await _rendered_length(side, empty)


async def _tokenization(runtime: Runtime, model: str) -> Tokenization:
    """The tokenizer of `model`; of a strategy, its base model's; of a pool, that of one of its servers."""
    await runtime.start_for(model)
    route = runtime.base_of(model)
    backend, known = route.backend, route.upstream_model
    if isinstance(backend, PoolBackend):
        backend, named = await backend.any_server()
        known = named or known
    if isinstance(backend, OpenAIBackend):
        return backend.tokenizer_of(known)
    if not isinstance(backend, Tokenization):
        raise ConfigurationError(f"the model {model!r} shows no tokenizer: set custom_get_token_ids")
    return backend


async def _rendered_length(side: Tokenization, request: GenerateRequest) -> int:
    chat = (request.messages or (), request.tools, request.template_arguments)
    if isinstance(side, ServerTokenization):
        return len(await side.rendered_ids(*chat))
    return len(await side.tokenize(await side.render(*chat)))


def _asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _explained(error: UpstreamStatusError) -> Exception:
    """`error`, or what to do about a server without the route."""
    if error.status not in _NO_ROUTE:
        return error
    return ConfigurationError(
        f"{error.message}: tokens are counted by the server's /tokenize, as vLLM and agentspec have it; for a server"
        " without it set custom_get_token_ids to a function from a text to its token ids"
    )
