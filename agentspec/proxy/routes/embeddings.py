"""`POST /v1/embeddings`: passed to upstreams, answered by encoders of this process."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import numpy as np
from pydantic import BeforeValidator

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.errors import ContextLengthError, InvalidRequestError
from agentspec.protocol.validation import Body, Refused, Text, kind_of, must, short
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.api import json_response, respond
from agentspec.proxy.body.amounts import check_amounts
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.endpoint import GatewayEndpoint
from agentspec.proxy.request_context import RequestContext
from agentspec.proxy.routes.tokenization import check_characters
from agentspec.types import Delta, Usage

if TYPE_CHECKING:
    from agentspec.backends.torch.embeddings import SentenceEncoder


def _texts(value: Any) -> Any:
    """One text or several; token ids are those of a tokenizer that clients of an encoder do not have."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        found = kind_of(value) if not isinstance(value, list) else "an array of something else, or an empty one"
        raise Refused(f" must be a text or an array of texts that are not empty, not {found}")
    return texts


FLOAT_BYTES = 20  # as JSON has them


class _EmbeddingBody(Body):
    model: Text = ""
    input: Annotated[list[Text], BeforeValidator(_texts)] | None = None
    encoding_format: Annotated[Any, must(lambda form: form in ("float", "base64"), " must be float or base64")] = (
        "float"
    )
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None


@dataclass(slots=True)
class EmbeddingsEndpoint(GatewayEndpoint):
    """Answers as OpenAI does, in `float` or `base64`. A text that is too long is refused, unless it may be cut."""

    async def respond(self, context: RequestContext, body: RequestBody, answer: RequestAnswer) -> None:
        backend = context.route.backend
        if isinstance(backend, OpenAIBackend):
            await super(EmbeddingsEndpoint, self).respond(context, body, answer)  # slots make the class another object
            return
        if not _embeds_here(backend):
            needed = 'ask a backend with kind = "encoder", or an upstream that has them'
            message = f"the model {answer.model!r} does not answer {self.path}; {needed}"
            raise InvalidRequestError(message, param="model")
        check_amounts(body.fields, self.path, self.services.settings)
        asked = _EmbeddingBody.parse(body.fields)
        texts = asked.input
        if texts is None:
            raise InvalidRequestError("input is missing", param="input")
        if asked.dimensions not in (None, backend.dimensions):
            wanted = short(asked.dimensions)
            message = f"dimensions = {wanted} is not supported: the vectors of this model have {backend.dimensions}"
            raise InvalidRequestError(message, param="dimensions")
        async with context.deadline.limit():
            counts = await _counted(backend, asked, texts)
            vectors = await backend.embed(texts, context.route.upstream_model, context.tenant)
        answer.count(Delta(usage=Usage(prompt_tokens=sum(counts))))
        size = FLOAT_BYTES * sum(map(len, vectors))
        whole = await body.work(lambda: json_response(_answer(asked, vectors, sum(counts))), size=size)
        await respond(answer, whole)


def _embeds_here(backend: object) -> TypeGuard[SentenceEncoder]:
    """Whether `backend` embeds in this process, and so knows how long texts and vectors are."""
    return hasattr(backend, "count_tokens")


async def _counted(backend: SentenceEncoder, body: _EmbeddingBody, texts: Sequence[str]) -> list[int]:
    """The tokens of each text that are read. Raises `ContextLengthError` for one that is too long and not to be cut."""
    most = backend.capabilities.context_length
    for at, text in enumerate(texts):
        check_characters(len(text), most, f"input[{at}]")
    counts = await backend.count_tokens(texts)
    cut = body.truncate_prompt_tokens
    if cut not in (None, -1, most):
        message = f"truncate_prompt_tokens must be -1 or {most}, where this model cuts texts"
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    long = next((at for at, count in enumerate(counts) if most is not None and count > most), None)
    if long is not None and cut is None:
        sizes = f"input[{long}] has {counts[long]} tokens, and this model reads {most}"
        raise ContextLengthError(f"{sizes}: send less, or truncate_prompt_tokens = -1", param="input")
    return [count if most is None else min(count, most) for count in counts]


def _answer(body: _EmbeddingBody, vectors: Sequence[Sequence[float]], tokens: int) -> dict[str, Any]:
    shown = [_encoded(vector) if body.encoding_format == "base64" else list(vector) for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def _encoded(vector: Sequence[float]) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
