"""The rows of OpenAI's chat completions and text completions, which every upstream has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentspec.backends.base import CHAT, COMPLETIONS
from agentspec.errors import InvalidRequestError
from agentspec.protocol.completions import CompletionWriter, parse_completion
from agentspec.protocol.requests import parse_chat
from agentspec.protocol.responses import ApiWriter, ChatWriter
from agentspec.proxy.api import Api, Fields, History
from agentspec.proxy.completions.prompts import several_prompts
from agentspec.proxy.request_context import RequestContext
from agentspec.types import MAX_CHOICES, GenerateRequest

Parsed = tuple[Sequence[GenerateRequest], ApiWriter]


def _parse_chat(fields: Fields, context: RequestContext, history: History) -> Parsed:
    request, form = parse_chat(fields)
    return [request], ChatWriter(request, form)


def _parse_completions(fields: Fields, context: RequestContext, history: History) -> Parsed:
    """One request for each prompt. Choices come in the order of the prompts, `n` for each."""
    prompts = several_prompts(fields.get("prompt"))
    parsed = [parse_completion({**fields, "prompt": prompt}) for prompt in prompts]
    first, form = parsed[0]
    count = len(prompts) * first.sampling.n
    if count > MAX_CHOICES:
        message = f"the request asks for {count} answers; {MAX_CHOICES} are allowed"
        raise InvalidRequestError(message, param="n")
    whole = replace(first, sampling=replace(first.sampling, n=count))
    return [request for request, _ in parsed], CompletionWriter(whole, form)


CHATS = Api(CHAT, _parse_chat)
TEXTS = Api(COMPLETIONS, _parse_completions, needs=COMPLETIONS)
