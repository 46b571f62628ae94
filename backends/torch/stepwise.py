"""Stepwise decoding, in which the caller chooses the scores that each token is drawn from; hidden states of texts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.backends.base import Floats
from agentspec.backends.torch.engine.kv_budget import ROOM
from agentspec.backends.torch.engine.sequence import AnswerText, EngineRequest, prompt_of
from agentspec.backends.torch.engine.tasks import Tasks, computed
from agentspec.backends.torch.model.batch import BatchItem, logit_rows
from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.text.structured_output import OutputParser
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import ContextLengthError, InvalidRequestError, OverloadedError
from agentspec.types import Delta, GenerateRequest, Usage

T = TypeVar("T")
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
        self._kv_cache = target.new_cache(slots)
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
        items = [BatchItem(self._kv_cache, [self._tokens[last]])]
        with HeadInput(self._target.module) as head:
            logits = self._target.run(items, logit_rows(items)).logits[0].float()
        self._kv_cache.commit(1, ())
        self._read = list(self._tokens)
        return StepOutput(logits[0].cpu().numpy(), head.states[0].cpu().numpy())

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
        constraints = request.start_constraints(target.vocab_size)
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
        parser: OutputParser | None,
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
        return delta if self._parser is None else self._parser.parse(delta)

    async def _begin(self) -> TorchSteps:
        """Read the prompt in chunks, so that other requests' steps can run in between."""
        steps = self._steps = await self._call(lambda: TorchSteps(self._target, self._request, self._lend))
        while steps.num_uncomputed:
            await self._call(steps.read)
        return steps

    async def _call(self, function: Callable[[], T]) -> T:
        return await computed(self._tasks, function)


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
        items = [BatchItem(target.new_cache(len(text)), text) for text in texts]
        groups = [items] if target.batched else [[item] for item in items]
        return [states.cpu().numpy() for group in groups for states in _states(target, group)]
    finally:
        give_back()


@torch.inference_mode()
def _states(target: TargetModel, items: Sequence[BatchItem]) -> Sequence[Tensor]:
    """Each item's hidden states [tokens, width] in float32; the head itself runs on a single row only."""
    sizes = [len(item) for item in items]
    with HeadInput(target.module, max_rows=1) as head:
        target.run(items, np.arange(sum(sizes)))
    return head.states.split_with_sizes(sizes)


class HeadInput:
    """Captures the output head's input: the hidden states after the last norm, whatever the architecture calls them.

    Inside `with`, `states` [rows, width] in float32 are what the last forward of `module` passed to its head. With
    `max_rows` the head computes only the first `max_rows` rows, for a caller that needs no logits.
    """

    def __init__(self, module: Any, max_rows: int | None = None) -> None:
        self.states = torch.empty(0)
        self._head = module.get_output_embeddings()
        self._max_rows = max_rows

    def __enter__(self) -> HeadInput:
        self._hook = self._head.register_forward_pre_hook(self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _record(self, head: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.states = inputs[0][0].float()
        return (inputs[0][:, : self._max_rows], *inputs[1:])


def require_one_answer(request: GenerateRequest) -> None:
    """Raise `InvalidRequestError` if the request asks for something that stepwise decoding does not support."""
    sampling = request.sampling
    for name, can in (("n", sampling.n == 1), ("logprobs", not sampling.logprobs)):
        if not can:
            raise InvalidRequestError(f"{name} is not supported with KNN-LM", param=name)


BLOCK = 8192  # rows whose lengths are computed together
ROUNDOFF = 2.0**-24  # unit roundoff of float32, rounding to nearest


class VectorScan:
    """Holds rows [n, width] in float32, and scores all queries at once.

    A row's score is query . row - |row|^2 / 2, greater for nearer rows. Only the computing thread may use it.
    """

    def __init__(self, rows: NDArray[np.float16], device: torch.device) -> None:
        parts = (rows[start : start + BLOCK].astype(np.float64) for start in range(0, len(rows), BLOCK))
        halves = np.concatenate([np.square(part).sum(1) / 2 for part in parts])
        self._rows = torch.from_numpy(rows.astype(np.float32)).to(device)
        self._halves = torch.from_numpy(halves).float().to(device)
        self._longest = float(np.sqrt(2 * halves.max()))

    def near(self, queries: Floats, count: int) -> list[NDArray[np.int64]]:
        """For each of `queries` [q, width], the indices, ascending, of the rows that may be among its `count` nearest.

        The result contains all nearest rows, equally near ones included, however the float32 sums were rounded.
        """
        scores = torch.from_numpy(queries).to(self._rows.device) @ self._rows.T - self._halves
        margins = (2 * self._error(np.linalg.norm(queries.astype(np.float64), axis=1))).tolist()
        return [_within(row, count, margin) for row, margin in zip(scores, margins, strict=True)]

    def _error(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """The largest error of a computed score, for queries of these lengths (norms).

        A sum of w products in any order has an error of at most w u |q| |r| to first order (Higham 2002, section 3.1);
        the half adds its own rounding and that of its subtraction. Twice the bound covers the second order.
        """
        products = (self._rows.shape[1] + 2) * lengths * self._longest
        return np.asarray(2 * ROUNDOFF * (products + self._longest**2))


def _within(scores: Tensor, count: int, margin: float) -> NDArray[np.int64]:
    """The indices of the `scores` that are at most `margin` below the `count`-th best."""
    least = scores.topk(min(count, len(scores))).values[-1].double() - margin
    found: NDArray[np.int64] = (scores.double() >= least).nonzero()[:, 0].cpu().numpy()
    return found
