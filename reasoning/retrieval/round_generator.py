"""Makes the queries and generates the rounds of one request."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from agentspec.backends.base import Backend, RecordsAnswers, Tokenization, closing_items, tokenization_of
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.reasoning.retrieval.partial_answer import PartialAnswer, RoundOutput
from agentspec.reasoning.retrieval.prompt import DocumentPrompt
from agentspec.reasoning.settings import RetrievalSettings
from agentspec.text.detokenizer import REPLACEMENT
from agentspec.types import Delta, FinishReason, GenerateRequest, SamplingParams, TokenLogprob

# Parameters of a whole answer, which a round cannot honour: it knows only its own tokens.
WHOLE_ANSWER = ("n", "presence_penalty", "frequency_penalty", "min_tokens", "bad_words", "structured_outputs")
REFUSED = (*WHOLE_ANSWER, "prompt_logprobs")
_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class RoundGenerator:
    """Generates rounds. A round depends only on the answer so far and on the document: generating it again gives the
    same tokens, provided that the backend's tokens depend only on prompt, sampling and seed."""

    backend: Backend
    tokenization: Tokenization
    request: GenerateRequest
    settings: RetrievalSettings
    prompt: DocumentPrompt
    limit: int
    seed: int | None

    @classmethod
    async def open(cls, request: GenerateRequest, backend: Backend, settings: RetrievalSettings) -> RoundGenerator:
        """Raises `InvalidRequestError` for request fields that rounds cannot honour, `ContextLengthError` for a
        question that does not fit even without a document, `ConfigurationError` for a backend without token ids."""
        tokenization = tokenization_of(backend)
        if tokenization is None:
            raise ConfigurationError(
                f"retrieval needs a model whose prompts can be token ids, which {request.model!r} does not take:"
                " a local model, or vLLM"
            )
        _check(request)
        length = backend.capabilities.context_length
        prompt = await DocumentPrompt.of(request, tokenization, settings.document_tokens, length)
        wanted, room = request.sampling.max_tokens, prompt.room()
        prompt.require(1 if wanted is None else wanted)
        limit = wanted or min(settings.max_tokens, settings.max_tokens if room is None else room)
        return cls(backend, tokenization, request, settings, prompt, limit, _seed(request.sampling))

    @property
    def stops(self) -> tuple[str, ...]:
        return self.request.sampling.stop

    async def begin(self) -> PartialAnswer:
        return await PartialAnswer.behind(self.prompt.tail, self.tokenization)

    async def query(self, answer: PartialAnswer) -> str:
        """The text of the last tokens of question and answer, without incomplete characters at its edges."""
        tokens = (*self.prompt.asked, *answer.token_ids)[-self.settings.query_tokens :]
        return (await self.tokenization.detokenize(tokens)).strip(REPLACEMENT)

    async def generate(self, answer: PartialAnswer, document: Document | None) -> PartialAnswer:
        """Generate one more round, and return the extended answer. Cancelling the call cancels the backend's work.

        Raises what the backend raises.
        """
        tokens = min(self.settings.round_tokens, self.limit - len(answer.token_ids))
        request = replace(
            self.request,
            messages=None,
            text=None,
            token_ids=await self.prompt.with_document(document, answer.token_ids, tokens),
            sampling=self._sampling(len(answer.token_ids), tokens),
            split_reasoning=False,
            share=False,
        )
        return await answer.extended(await _generate(self.backend, request), self.tokenization, self.limit, self.stops)

    def _sampling(self, position: int, tokens: int) -> SamplingParams:
        """The sampling of a round. Each round has its own seed: some backends restart from the seed at each request."""
        seed = None if self.seed is None else _mixed(self.seed, position)
        return replace(self.request.sampling, max_tokens=tokens, seed=seed)

    async def record(self, answer: PartialAnswer) -> None:
        """Let the backend's token cache keep the whole answer, not its rounds: they are short, and some are dropped."""
        if self.request.store and answer.token_ids and isinstance(self.backend, RecordsAnswers):
            question = (*self.prompt.head, *self.prompt.tail)
            request = replace(self.request, messages=None, text=None, token_ids=question)
            await self.backend.record(request, answer.token_ids)


async def _generate(backend: Backend, request: GenerateRequest) -> RoundOutput:
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    text = ""
    finish: FinishReason = "stop"
    answer = backend.generate(request)
    async with closing_items(answer):
        async for delta in answer:
            ids += delta.token_ids
            logprobs += delta.logprobs
            text, finish = text + _text_of(delta), delta.finish_reason or finish
    return RoundOutput(tuple(ids), text, finish, tuple(logprobs))


def _text_of(delta: Delta) -> str:
    thought = delta.extra.get("reasoning_content")
    return (thought if isinstance(thought, str) else "") + delta.text


def _seed(sampling: SamplingParams) -> int | None:
    """The request's seed, or a random seed for this answer: a round that is generated again must draw the same."""
    if sampling.seed is not None or sampling.temperature == 0:
        return sampling.seed
    return secrets.randbits(31)


def _mixed(seed: int, position: int) -> int:
    digest = hashlib.sha256(f"{seed}/{position}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # endpoints differ in how large a seed they take


_EFFORT = {"enable_thinking", "reasoning_effort"}  # what clients ask of every model; this one does not think


def _check(request: GenerateRequest) -> None:
    """Raises `InvalidRequestError` for request fields whose meaning would change from round to round."""
    for name in REFUSED:
        if _given(getattr(request.sampling, name), getattr(_DEFAULTS, name)) or _asked(request.extra, name):
            form = request.sampling.structured_outputs
            asked = form.param if form and name == "structured_outputs" else name
            raise InvalidRequestError(f"a model with retrieval answers without {asked}", param=asked)
    if request.tools or _asked(request.extra, "tools") or _asked(request.extra, "functions"):
        raise InvalidRequestError("a model with retrieval calls no tools", param="tools")
    if _asked(request.extra, "response_format"):
        raise InvalidRequestError("a model with retrieval answers without response_format", param="response_format")
    defaults = {field.name: field.default for field in fields(GenerateRequest)}
    for name in ("continue_final", "start_answer", "return_prompt", "prediction"):
        if getattr(request, name) != defaults[name]:
            raise InvalidRequestError(f"a model with retrieval answers without {name}", param=name)
    if set(request.template_arguments) - _EFFORT:
        raise InvalidRequestError("a model with retrieval takes no template arguments", param="chat_template_kwargs")


def _given(value: Any, default: Any) -> bool:
    return bool(value != default)


def _asked(extra: Mapping[str, Any], name: str) -> bool:
    return extra.get(name) not in (None, [], (), {}, getattr(_DEFAULTS, name, None))
