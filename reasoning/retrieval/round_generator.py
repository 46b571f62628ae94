"""Makes the queries and generates the rounds of one request."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from agentspec.backends.base import (
    Backend,
    RecordsAnswers,
    Tokenization,
    closing_items,
    tokenization_of,
)
from agentspec.backends.local_abilities import AnswerReader, ContinuesAnswers
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.reasoning.retrieval.partial_answer import Detokenizes, PartialAnswer, RoundOutput
from agentspec.reasoning.retrieval.prompt import DocumentPrompt
from agentspec.reasoning.settings import RetrievalSettings
from agentspec.text import REPLACEMENT
from agentspec.types import Delta, FinishReason, GenerateRequest, SamplingParams, TokenLogprob

# Parameters of a whole answer: an endpoint's round knows only its own tokens, a local model goes on with the answer.
WHOLE_ANSWER = ("presence_penalty", "frequency_penalty", "bad_words", "structured_outputs")
REFUSED = ("n", "min_tokens", "prompt_logprobs")
_UNREAD = (  # fields of a chat, which endpoints know and rounds of token ids do not
    *("tools", "functions", "response_format", "chat_template_kwargs", "reasoning_effort", "chat_template"),
    *("max_completion_tokens", "continue_final_message", "add_generation_prompt"),
)
_OF_ENDPOINTS = (*WHOLE_ANSWER, *_UNREAD)
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
    whole: WholeAnswer | None = None

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
        continues = _continues(request, backend)
        length = backend.capabilities.context_length
        prompt = await DocumentPrompt.of(request, tokenization, settings.document_tokens, length)
        whole = None if continues is None else await WholeAnswer.of(request, continues, prompt)
        wanted, room = request.sampling.max_tokens, prompt.room()
        prompt.require(1 if wanted is None else wanted)
        limit = wanted or min(settings.max_tokens, settings.max_tokens if room is None else room)
        return cls(backend, tokenization, request, settings, prompt, limit, _seed(request.sampling), whole)

    @property
    def stops(self) -> tuple[str, ...]:
        return self.request.sampling.stop

    @property
    def reader(self) -> AnswerReader | None:
        """How to read the answer; None for one that is plain text."""
        return None if self.whole is None else self.whole.reader

    @property
    def _spelling(self) -> Detokenizes:
        return self.tokenization if self.whole is None else self.whole

    async def begin(self) -> PartialAnswer:
        return await PartialAnswer.behind(self.prompt.tail, self._spelling)

    async def query(self, answer: PartialAnswer) -> str:
        """The text of the last tokens of question and answer, without incomplete characters at its edges, and without
        tool calls: their syntax says nothing of what is asked. Thoughts do.
        """
        said: Sequence[int] = answer.token_ids
        if self.whole is not None and self.request.tools:
            said = await self.tokenization.tokenize(self.whole.text_of(answer.text))
        tokens = (*self.prompt.asked, *said)[-self.settings.query_tokens :]
        return (await self.tokenization.detokenize(tokens)).strip(REPLACEMENT)

    async def generate(self, answer: PartialAnswer, document: Document | None) -> PartialAnswer:
        """Generate one more round, and return the extended answer. Cancelling the call cancels the backend's work.

        Raises what the backend raises.
        """
        tokens = min(self.settings.round_tokens, self.limit - len(answer.token_ids))
        prompt = await self.prompt.with_document(document, len(answer.token_ids) + tokens)
        sampling = self._sampling(len(answer.token_ids), tokens)
        request = replace(self.request, sampling=sampling, split_reasoning=False, share=False)
        if self.whole is not None:
            deltas = self.whole.backend.continue_answer(request, prompt, answer.token_ids)
        else:
            ids = (*prompt, *answer.token_ids)
            deltas = self.backend.generate(replace(request, messages=None, text=None, token_ids=ids))
        return await answer.extended(await _read(deltas), self._spelling, self.limit, self.stops)

    def _sampling(self, position: int, tokens: int) -> SamplingParams:
        """The sampling of a round. Each round has its own seed: some backends restart from the seed at each request."""
        seed = None if self.seed is None else _mixed(self.seed, position)
        return replace(self.request.sampling, max_tokens=tokens, seed=seed)

    async def record(self, answer: PartialAnswer) -> None:
        """Let the backend's token cache keep the whole answer, not its rounds: they are short, and some are dropped."""
        if self.request.store and answer.token_ids and isinstance(self.backend, RecordsAnswers):
            question = (*self.prompt.head, *self.prompt.tail)
            request = replace(self.request, messages=None, text=None, token_ids=question, tools=(), tool_choice="auto")
            await self.backend.record(request, answer.token_ids)


async def _read(answer: AsyncIterator[Delta]) -> RoundOutput:
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    text = ""
    finish: FinishReason = "stop"
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


_EFFORT = {"enable_thinking", "reasoning_effort"}  # what clients ask of every model


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that a local model goes on with, keeping the rules of the whole answer, and how to read it."""

    backend: ContinuesAnswers
    reader: AnswerReader

    @classmethod
    async def of(cls, request: GenerateRequest, backend: ContinuesAnswers, prompt: DocumentPrompt) -> WholeAnswer:
        return cls(backend, await asyncio.to_thread(backend.answer_reader, request, (*prompt.head, *prompt.tail)))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await asyncio.to_thread(self.reader.decode, token_ids)

    def text_of(self, text: str) -> str:
        """The thoughts and the text of an answer, or of its beginning, without its tool calls."""
        return _text_of(self.reader.parser().parse(Delta(text=text)))


def _continues(request: GenerateRequest, backend: Backend) -> ContinuesAnswers | None:
    """The local model that goes on with an answer that has rules of the whole, or may begin with thoughts; None for
    plain text. Raises `InvalidRequestError` for rules that the model cannot keep.
    """
    named = next((name for name in WHOLE_ANSWER if _sampled(request, name)), None)
    named = named or ("tools" if request.tools else None)
    unread = next((name for name in _OF_ENDPOINTS if _asked(request.extra, name)), None)
    if unread is None and isinstance(backend, ContinuesAnswers):
        return None if named is None and request.messages is None else backend
    if named or unread:
        form = request.sampling.structured_outputs
        name = unread or (form.param if form and named == "structured_outputs" else named)
        message = f"a model with retrieval answers without {name}, unless the model is a local one"
        raise InvalidRequestError(message, param=name)
    return None


def _check(request: GenerateRequest) -> None:
    """Raises `InvalidRequestError` for request fields whose meaning would change from round to round."""
    for name in REFUSED:
        if _sampled(request, name) or _asked(request.extra, name):
            raise InvalidRequestError(f"a model with retrieval answers without {name}", param=name)
    defaults = {field.name: field.default for field in fields(GenerateRequest)}
    shows = "echo" if request.messages is None else "return_token_ids"
    asked = {
        "continue_final": "continue_final_message",
        "start_answer": "add_generation_prompt",
        "return_prompt": shows,
    }
    for name in (*asked, "prediction"):
        if getattr(request, name) != defaults[name]:
            param = asked.get(name, name)  # as clients call it
            raise InvalidRequestError(f"a model with retrieval answers without {param}", param=param)
    if set(request.template_arguments) - _EFFORT:
        raise InvalidRequestError("a model with retrieval takes no template arguments", param="chat_template_kwargs")


def _sampled(request: GenerateRequest, name: str) -> bool:
    return bool(getattr(request.sampling, name) != getattr(_DEFAULTS, name))


def _asked(extra: Mapping[str, Any], name: str) -> bool:
    return extra.get(name) not in (None, [], (), {}, getattr(_DEFAULTS, name, None))
