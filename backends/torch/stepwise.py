"""Stepwise decoding, in which the caller chooses the scores that each token is drawn from; hidden states of texts."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from agentspec.backends.base import Floats
from agentspec.backends.torch.engine.compute_thread import Tasks
from agentspec.backends.torch.engine.kv_budget import ROOM
from agentspec.backends.torch.engine.request import AnswerText, EngineRequest, prompt_of
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.text.output_parser import OutputParser
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import (
    AgentSpecError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from agentspec.telemetry.safe_errors import error_location
from agentspec.types import Delta, GenerateRequest, Usage

T = TypeVar("T")
logger = logging.getLogger(__name__)
CHUNK = 256  # prompt tokens read in one forward
Lend = Callable[[int], Callable[[], None]]  # sets KV slots aside, and returns what gives them back


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """A forward's result after a text's last token: `logits` [vocab], and `hidden` [width], the output head's input."""

    logits: Floats
    hidden: Floats


class TorchSteps:
    """One answer, decoded token by token by a caller that chooses the scores from which each token is drawn.

    `tokens` are the prompt and the tokens added so far. Only the computing thread uses it, inside `TorchSession.run`.
    """

    def __init__(self, target: TargetModel, request: EngineRequest, lend: Lend) -> None:
        self._target, self._request = target, request
        self._tokens = list(request.prompt)
        slots = len(request.prompt) + request.max_tokens + ROOM
        weakref.finalize(self, lend(slots))  # the slots are given back when their memory is
        kv_cache = target.new_cache(slots)
        assert isinstance(kv_cache, SequenceCache), "a model whose slots cannot be rewound was opened for steps"
        self._kv_cache = kv_cache
        self._read: list[int] = []  # the tokens that the KV slots were last computed for
        self._seed: int | None = request.sampling.seed
        self._sampler = self._fresh_sampler()
        self._seed = self._sampler.seed

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def plain(self) -> bool:
        """Whether `draw` simply returns the token with the best score, of equals the lowest id."""
        return self._sampler.plain

    @property
    def num_uncomputed(self) -> int:
        """The number of prompt tokens, without the last, that `read` has yet to compute."""
        return max(0, len(self._request.prompt) - 1 - self._kv_cache.length)

    def read(self) -> None:
        """Compute the next chunk of the prompt, which never includes the prompt's last token."""
        chunk = self._tokens[self._kv_cache.length : self._kv_cache.length + min(CHUNK, self.num_uncomputed)]
        self._target.prefill(self._kv_cache, chunk)

    def advance(self) -> StepOutput:
        """Run the model over the last token, and over the tokens before it that were not computed yet.

        Each added token has a forward of its own, so that the result does not depend on tokens rewound before.
        """
        while self.num_uncomputed:
            self.read()
        last = len(self._tokens) - 1
        self._forget(last)
        for token in self._tokens[self._kv_cache.length : last]:
            self._target.prefill(self._kv_cache, [token])
        logits, state = self._target.forward_with_hidden(self._kv_cache, self._tokens[last])
        self._kv_cache.commit(1, ())
        self._read = list(self._tokens)
        return StepOutput(logits.cpu().numpy(), state.cpu().numpy())

    def draw(self, scores: Floats) -> int:
        """Draw the next token by the request's sampling, with `scores` [vocab] as logits. Does not add the token.

        The result depends on scores, tokens, seed and position alone.
        """
        self._sampler.begin(to_device(scores[None], self._target.device))
        return self._sampler.choose(0)

    def add(self, token: int) -> bool:
        """Add a token; returns True if the answer must end with it, because of an end token or the length limit."""
        if self._read[len(self._tokens) : len(self._tokens) + 1] != [token]:
            self._forget(len(self._tokens))
        self._tokens.append(token)
        self._sampler.observe(token)
        request = self._request
        return token in request.stop_ids or len(self._tokens) - len(request.prompt) >= request.max_tokens

    def rewind(self, length: int) -> None:
        """Drop all but the first `length` tokens, at least the prompt. Tokens added again are not computed again."""
        assert len(self._request.prompt) <= length, "a prompt cannot be rewound"
        del self._tokens[length:]
        self._sampler = self._fresh_sampler()
        for token in self._tokens[len(self._request.prompt) :]:
            self._sampler.observe(token)

    def _forget(self, length: int) -> None:
        """Drop all KV slots from position `length` on."""
        self._kv_cache.truncate(min(self._kv_cache.length, length))

    def _fresh_sampler(self) -> Sampler:
        request, target = self._request, self._target
        constraints = request.constraints.start(request.sampling.min_tokens, request.stop_ids, target.vocab_size)
        sampling = replace(request.sampling, seed=self._seed)
        return Sampler(sampling, target.vocab_size, request.prompt, target.device, constraints=constraints)


class TorchSession:
    """Runs an answer's steps in the computing thread and makes its text in the caller's."""

    def __init__(
        self,
        target: TargetModel,
        request: EngineRequest,
        tasks: Tasks,
        tokenizer: TokenizerAdapter,
        parser: OutputParser,
        lend: Lend,
    ) -> None:
        self._target, self._request, self._tasks, self._parser = target, request, tasks, parser
        self._lend = lend
        self._steps: TorchSteps | None = None
        self._answer = AnswerText(request, tokenizer)
        self._prompt = prompt_of(request, tokenizer) if request.original.return_prompt else None

    async def run(self, function: Callable[[TorchSteps], T]) -> T:
        """Run `function` in the computing thread, between other requests' steps; returns its result."""
        steps = self._steps or await self._begin()
        return await self._call(lambda: function(steps))

    def tell(self, tokens: Sequence[int]) -> Delta:
        """The delta that a client gets for the next `tokens`; `finish_reason` is set when the answer ends, and tokens
        after the end are left out.
        """
        answer, fresh = self._answer, list[int]()
        for token in tokens:
            fresh.append(token)
            if answer.add(token):
                break
        usage = Usage(prompt_tokens=len(self._request.prompt), completion_tokens=answer.num_tokens)
        prompt, self._prompt = self._prompt, None
        delta = Delta(
            text=answer.take(),
            token_ids=tuple(fresh),
            finish_reason=answer.finish,
            stop_reason=answer.stop_reason,
            usage=usage if answer.finish else None,
            prompt=prompt,
        )
        return self._parser.parse(delta)

    async def _begin(self) -> TorchSteps:
        """Read the prompt in chunks, so that other requests' steps can run in between."""
        steps = self._steps = await self._call(lambda: TorchSteps(self._target, self._request, self._lend))
        while steps.num_uncomputed:
            await self._call(steps.read)
        return steps

    async def _call(self, function: Callable[[], T]) -> T:
        return await computed(self._tasks, function)


async def computed(tasks: Tasks, function: Callable[[], T]) -> T:
    """Run `function` in the computing thread and return its result. Raises its `AgentSpecError`s as they are, and
    `EngineError` for any other exception.
    """
    try:
        return await asyncio.wrap_future(tasks.submit(function))
    except AgentSpecError:
        raise
    except Exception as error:
        logger.error("the engine failed on a step: %s", error_location(error))
        raise EngineError("the engine failed on this request") from error


def states_of(target: TargetModel, texts: Sequence[Sequence[int]], lend: Lend) -> list[Floats]:
    """The hidden states [tokens, width] of each text of token ids. As many as fit into memory share a forward."""
    if not texts:
        return []
    try:
        give_back = lend(sum(map(len, texts)))
    except (OverloadedError, ContextLengthError):
        if len(texts) == 1:
            raise
        half = len(texts) // 2
        return states_of(target, texts[:half], lend) + states_of(target, texts[half:], lend)
    try:
        states = target.states_batch([BatchItem(target.new_cache(len(text)), text) for text in texts])
        return [rows.cpu().numpy() for rows in states]
    finally:
        give_back()


def require_one_answer(request: GenerateRequest) -> None:
    """Raise `InvalidRequestError` if the request asks for something that stepwise decoding does not support."""
    sampling = request.sampling
    carried = {
        "n": sampling.n == 1,
        "logprobs": not sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs is None,
    }
    for name, can in carried.items():
        if not can:
            raise InvalidRequestError(f"an answer made token by token comes without {name}", param=name)
