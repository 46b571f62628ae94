"""Rounds of one answer: the prompt that a document is put into, the answer so far, and what goes on with it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from agentspec.backends.base import Backend, Tokenization, closing_items, is_local, tokenization_of
from agentspec.backends.chat_templates import escape_markers
from agentspec.backends.torch.text.chat_template import plain
from agentspec.errors import ConfigurationError, ContextLengthError, InvalidRequestError
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.reasoning.strategy import whole_text
from agentspec.text import CONTEXT_TOKENS, REPLACEMENT, StopScanner, added_text
from agentspec.types import Delta, FinishReason, GenerateRequest, Message, SamplingParams, TokenLogprob, Usage

ROUND_TOKENS = 4  # generated from one document: k of RaLMSpec
ANSWER_TOKENS = 256  # where the request names no length
QUERY_TOKENS = 32  # last tokens whose text is the query: q of RaLMSpec
SEPARATOR = "\n\n"  # between the document and the question
REFUSED = (  # a round knows its own tokens alone, and nothing of the chat that its prompt was rendered from
    *("n", "min_tokens", "presence_penalty", "frequency_penalty", "bad_words", "structured_outputs", "functions"),
    *("response_format", "chat_template_kwargs", "reasoning_effort", "chat_template", "max_completion_tokens"),
    *("continue_final_message", "add_generation_prompt", "prompt_logprobs", "tools"),
)
_DEFAULTS, _PLAIN = SamplingParams(), GenerateRequest("", text="")


@dataclass(slots=True)
class DocumentPrompt:
    """The question's tokens before (`head`) and after (`tail`) the document. The first query is made of `asked`.

    If the document does not fit into the model's context of `length` tokens, the document is cut, never the question.
    """

    tokenization: Tokenization
    head: tuple[int, ...]
    tail: tuple[int, ...]
    asked: tuple[int, ...]
    document_tokens: int
    length: int | None = None
    _gap: tuple[int, ...] = ()
    _read: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    async def of(
        cls, request: GenerateRequest, tokenization: Tokenization, document_tokens: int, length: int | None
    ) -> DocumentPrompt:
        """Raises `InvalidRequestError` for messages that are not text or that the template refuses."""
        gap = tuple(await tokenization.tokenize(SEPARATOR))
        if request.messages is not None:
            head, tail, asked = await _of_messages(request, request.messages, tokenization)
        else:
            head, tail = await _of_text(request, tokenization)
            asked = tail
        return cls(tokenization, head, tail, asked, document_tokens, length, gap)

    @property
    def tokens(self) -> int:
        """The number of tokens in the question."""
        return len(self.head) + len(self.tail)

    def room(self, answer: int = 0) -> int | None:
        """Tokens left in the model's context after the question and `answer` tokens of answer; None if unknown."""
        return None if self.length is None else self.length - self.tokens - answer

    async def with_document(self, document: Document | None, answer: int) -> tuple[int, ...]:
        """The prompt of an answer of `answer` tokens, with as much of the document as fits."""
        if document is None:
            return (*self.head, *self.tail)
        written = f"{document.title}\n{document.text}" if document.title else document.text
        if written not in self._read:
            tokens = await self.tokenization.tokenize(escape_markers(written))
            self._read[written] = tuple(tokens)[: self.document_tokens]
        room = self.room(answer)
        fits = self.document_tokens if room is None else max(0, room - len(self._gap))
        read = self._read[written][:fits]
        return (*self.head, *read, *(self._gap if read else ()), *self.tail)


async def _of_messages(
    request: GenerateRequest, messages: Sequence[Message], tokenization: Tokenization
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Tokens of the rendered messages before and from the last user message's text on, and of that text."""
    users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    last = users[-1] if users else len(messages) - 1
    mark = f"document-{secrets.token_hex(8)}"
    asked = str(plain(messages[last]).get("content", ""))
    marked = [{**message, "content": mark + asked} if at == last else message for at, message in enumerate(messages)]
    rendered = await tokenization.render(marked, (), request.template_arguments)
    head, _, tail = rendered.partition(mark)
    return (
        tuple(await tokenization.tokenize(head)),
        tuple(await tokenization.tokenize(tail)),
        tuple(await tokenization.tokenize(asked)),
    )


async def _of_text(request: GenerateRequest, tokenization: Tokenization) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before and after the document, which comes after the model's begin-of-text tokens."""
    begin = tuple(await tokenization.tokenize("", begins=True))
    ids = tuple(request.token_ids or ()) if request.text is None else tuple(await tokenization.tokenize(request.text))
    if request.text is None and begin and ids[: len(begin)] != begin:
        return (), ids
    return begin, ids[len(begin) :] if request.text is None else ids


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """An answer that grows round by round; the same rounds always give the same text.

    `text` holds whole characters and ends before the first stop string. The next tokens are decoded together with the
    last tokens, `window`, whose text so far is `known`.
    """

    window: tuple[int, ...] = ()
    known: str = ""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | None = None

    @classmethod
    async def behind(cls, prompt: Sequence[int], tokenization: Tokenization) -> PartialAnswer:
        """An empty answer to a prompt that ends in `prompt`."""
        window = tuple(prompt[-CONTEXT_TOKENS:])
        return cls(window, await tokenization.detokenize(window) if window else "")

    @property
    def over(self) -> bool:
        return self.finish is not None

    def certain(self, stops: Sequence[str]) -> str:
        """The text that cannot become part of a stop string any more."""
        return self.text if self.over else StopScanner(tuple(stops)).feed(self.text)

    async def extended(
        self, output: Delta, tokenization: Tokenization, limit: int, stops: Sequence[str] = ()
    ) -> PartialAnswer:
        """The answer with one more round, up to `limit` tokens in all. A token that ends the answer adds no text."""
        grown = replace(self, token_ids=self.token_ids + output.token_ids, logprobs=self.logprobs + output.logprobs)
        spelled = await grown.spelled(output.token_ids, tokenization)
        scanner = StopScanner(tuple(stops))
        certain = scanner.feed(spelled.text)
        if scanner.stopped:
            return replace(spelled, text=certain, finish="stop", stop_reason=scanner.matched)
        if output.finish_reason not in ("stop", "length"):
            return replace(await spelled.flushed(tokenization), finish=output.finish_reason)
        if output.finish_reason == "stop" or not output.token_ids:
            shorter = await (await grown.spelled(output.token_ids[:-1], tokenization)).flushed(tokenization)
            silent = shorter.text == self.text + output.text or await _ends_silently(output, tokenization)
            return replace(shorter if silent else await spelled.flushed(tokenization), finish=output.finish_reason)
        if len(grown.token_ids) >= limit:
            return replace(await spelled.flushed(tokenization), finish="length")
        return spelled

    async def spelled(self, token_ids: tuple[int, ...], tokenization: Tokenization) -> PartialAnswer:
        """The answer with the text of `token_ids`; bytes of an incomplete character wait for the next round."""
        if not token_ids:
            return self
        window = self.window + token_ids
        whole = await tokenization.detokenize(window)
        added = added_text(whole, self.known)
        if whole.endswith(REPLACEMENT):
            complete = whole.rstrip(REPLACEMENT)
            return replace(self, window=window, known=complete, text=self.text + added_text(complete, self.known))
        last = window[-CONTEXT_TOKENS:]
        return replace(self, window=last, known=await tokenization.detokenize(last), text=self.text + added)

    async def flushed(self, tokenization: Tokenization) -> PartialAnswer:
        """The answer with the bytes that were held back, even if they form no whole character."""
        whole = await tokenization.detokenize(self.window) if self.window else ""
        return replace(self, known=whole, text=self.text + added_text(whole, self.known))


async def _ends_silently(output: Delta, tokenization: Tokenization) -> bool:
    """Whether the last token ended the answer and is not part of its text, by the end of the text alone."""
    if not output.token_ids:
        return False
    last = await tokenization.detokenize(output.token_ids[-1:])
    return not output.text.endswith(last) if last else True


@dataclass(frozen=True, slots=True)
class RoundGenerator:
    """Generates rounds. A round depends only on the answer so far and on the document: generating it again gives the
    same tokens, provided that the backend's tokens depend only on prompt, sampling and seed."""

    backend: Backend
    request: GenerateRequest
    prompt: DocumentPrompt
    limit: int
    seed: int | None

    @classmethod
    async def open(cls, request: GenerateRequest, backend: Backend, document_tokens: int) -> RoundGenerator:
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
        prompt = await DocumentPrompt.of(request, tokenization, document_tokens, length)
        wanted, room = request.sampling.max_tokens, prompt.room()
        if room is not None and (wanted or 1) > max(room, 0):
            raise ContextLengthError(
                f"the prompt has {prompt.tokens} tokens and max_tokens is {wanted or 1}; the model takes {length}",
                param="messages",
            )
        limit = wanted or min(ANSWER_TOKENS, ANSWER_TOKENS if room is None else room)
        return cls(backend, request, prompt, limit, _seed(request.sampling))

    @property
    def stops(self) -> tuple[str, ...]:
        return self.request.sampling.stop

    async def begin(self) -> PartialAnswer:
        return await PartialAnswer.behind(self.prompt.tail, self.prompt.tokenization)

    async def query(self, answer: PartialAnswer) -> str:
        """The text of the last tokens of question and answer, without incomplete characters at its edges."""
        tokens = (*self.prompt.asked, *answer.token_ids)[-QUERY_TOKENS:]
        return (await self.prompt.tokenization.detokenize(tokens)).strip(REPLACEMENT)

    async def generate(self, answer: PartialAnswer, document: Document | None) -> PartialAnswer:
        """Generate one more round, and return the extended answer. Cancelling the call cancels the backend's work.

        Raises what the backend raises.
        """
        tokens = min(ROUND_TOKENS, self.limit - len(answer.token_ids))
        prompt = await self.prompt.with_document(document, len(answer.token_ids) + tokens)
        sampling = self._sampling(len(answer.token_ids), tokens)
        request = replace(self.request, sampling=sampling, split_reasoning=False, share=False)
        ids = (*prompt, *answer.token_ids)
        deltas = self.backend.generate(replace(request, messages=None, text=None, token_ids=ids))
        return await answer.extended(await _read(deltas), self.prompt.tokenization, self.limit, self.stops)

    def _sampling(self, position: int, tokens: int) -> SamplingParams:
        """The sampling of a round. Each round has its own seed: some backends restart from the seed at each request."""
        seed = self.seed
        if seed is not None:  # endpoints differ in how large a seed they take
            seed = int.from_bytes(hashlib.sha256(f"{seed}/{position}".encode()).digest()[:4], "big") >> 1
        return replace(self.request.sampling, max_tokens=tokens, seed=seed)

    async def record(self, answer: PartialAnswer) -> None:
        """Let the backend's token cache keep the whole answer, not its rounds: they are short, and some are dropped."""
        if self.request.store and answer.token_ids and is_local(self.backend, "record"):
            question = (*self.prompt.head, *self.prompt.tail)
            request = replace(self.request, messages=None, text=None, token_ids=question)
            await self.backend.record(request, answer.token_ids)


async def _read(answer: AsyncIterator[Delta]) -> Delta:
    """All deltas of a round as one."""
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    text = ""
    finish: FinishReason = "stop"
    async with closing_items(answer):
        async for delta in answer:
            ids += delta.token_ids
            logprobs += delta.logprobs
            text, finish = text + whole_text(delta), delta.finish_reason or finish
    return Delta(text, tuple(ids), finish_reason=finish, logprobs=tuple(logprobs))


def _seed(sampling: SamplingParams) -> int | None:
    """The request's seed, or a random seed for this answer: a round that is generated again must draw the same."""
    if sampling.seed is not None or sampling.temperature == 0:
        return sampling.seed
    return secrets.randbits(31)


_EFFORT = {"enable_thinking", "reasoning_effort"}  # what clients ask of every model


def _check(request: GenerateRequest) -> None:
    """Raises `InvalidRequestError` for request fields whose meaning would change from round to round."""
    form = request.sampling.structured_outputs
    for name in REFUSED:
        sampled = getattr(request.sampling, name, None) != (default := getattr(_DEFAULTS, name, None))
        if sampled or request.extra.get(name) not in (None, [], (), {}, default) or (name == "tools" and request.tools):
            param = form.param if form is not None and name == "structured_outputs" else name
            raise InvalidRequestError(f"{param} is not supported by a model with retrieval", param=param)
    for name, param in {  # and as clients call it
        "continue_final": "continue_final_message",
        "start_answer": "add_generation_prompt",
        "return_prompt": "echo" if request.messages is None else "return_token_ids",
        "prediction": "prediction",
    }.items():
        if getattr(request, name) != getattr(_PLAIN, name):
            raise InvalidRequestError(f"{param} is not supported by a model with retrieval", param=param)
    if set(request.template_arguments) - _EFFORT:
        raise InvalidRequestError("a model with retrieval accepts no template arguments", param="chat_template_kwargs")


class AnswerWriter:
    """Makes the deltas of an answer whose rounds are verified."""

    def __init__(self, generator: RoundGenerator) -> None:
        self._generator = generator
        self._before, self._sent = PartialAnswer(), 0

    def verified(self, answer: PartialAnswer) -> Delta:
        """What one more round adds; text that may be the start of a stop string is held back."""
        before, self._before = self._before, answer
        text, start = answer.certain(self._generator.stops), self._sent
        self._sent = len(text)
        ids, logprobs = answer.token_ids[len(before.token_ids) :], answer.logprobs[len(before.logprobs) :]
        return Delta(text[start:], ids, logprobs=logprobs)

    async def ended(self, answer: PartialAnswer) -> Delta:
        """The last delta. `prompt_tokens` counts the question without documents."""
        await self._generator.record(answer)
        usage = Usage(self._generator.prompt.tokens, len(answer.token_ids))
        return Delta(finish_reason=answer.finish, stop_reason=answer.stop_reason, usage=usage)
