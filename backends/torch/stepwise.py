"""One answer made token by token, by someone who decides what each token is drawn from; and the states of texts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from agentspec.backends.base import Floats, StepOutput
from agentspec.backends.torch.engine.compute_thread import Tasks
from agentspec.backends.torch.engine.sequence import EngineRequest
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.text.output_parser import OutputParser
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import AgentSpecError, EngineError, InvalidRequestError
from agentspec.telemetry.safe_errors import error_location
from agentspec.text.detokenizer import Detokenizer
from agentspec.text.stop_strings import StopScanner
from agentspec.types import Delta, FinishReason, GenerateRequest, Prompt, Usage

T = TypeVar("T")
logger = logging.getLogger(__name__)
CHUNK = 256  # tokens of a prompt read in one forward


class TorchSteps:
    """`Steps` over a model whose rows can be rewound. Lives in the computing thread."""

    def __init__(self, target: TargetModel, job: EngineRequest) -> None:
        self._target, self._job = target, job
        self._tokens = list(job.prompt)
        rows = target.new_rows(len(job.prompt) + min(job.max_tokens, CHUNK))
        assert isinstance(rows, SequenceCache), "a model whose rows cannot be rewound was opened for steps"
        self._rows = rows
        self._read: list[int] = []  # the tokens that the rows were last computed for
        self._seed: int | None = job.sampling.seed
        self._sampler = self._fresh_sampler()
        self._seed = self._sampler.seed

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def plain(self) -> bool:
        return self._sampler.plain

    @property
    def unread(self) -> int:
        """Tokens of the prompt that `read` still has to compute before `advance`."""
        return max(0, len(self._job.prompt) - 1 - self._rows.length)

    def read(self) -> None:
        """Compute a chunk of the prompt, its last token excepted."""
        chunk = self._tokens[self._rows.length : self._rows.length + min(CHUNK, self.unread)]
        self._target.prefill(self._rows, chunk)

    def advance(self) -> StepOutput:
        while self.unread:
            self.read()
        last = len(self._tokens) - 1
        self._forget(last)
        for token in self._tokens[self._rows.length : last]:
            self._target.prefill(self._rows, [token])
        logits, state = self._target.forward_shown(self._rows, self._tokens[last])
        self._rows.commit(1, ())
        self._read = list(self._tokens)
        return StepOutput(logits.cpu().numpy(), state.cpu().numpy())

    def draw(self, scores: Floats) -> int:
        self._sampler.begin(to_device(scores[None], self._target.device))
        return self._sampler.choose(0)

    def add(self, token: int) -> bool:
        if self._read[len(self._tokens) : len(self._tokens) + 1] != [token]:
            self._forget(len(self._tokens))
        self._tokens.append(token)
        self._sampler.observe(token)
        return token in self._job.stop_ids or len(self._tokens) - len(self._job.prompt) >= self._job.max_tokens

    def rewind(self, length: int) -> None:
        assert len(self._job.prompt) <= length, "a prompt cannot be rewound"
        del self._tokens[length:]
        self._sampler = self._fresh_sampler()
        for token in self._tokens[len(self._job.prompt) :]:
            self._sampler.observe(token)

    def _forget(self, length: int) -> None:
        """No rows from `length` on."""
        self._rows.truncate(min(self._rows.length, length))

    def _fresh_sampler(self) -> Sampler:
        job, target = self._job, self._target
        limits = job.rules.limits(job.sampling.min_tokens, job.stop_ids, target.vocab_size)
        sampling = replace(job.sampling, seed=self._seed)
        return Sampler(sampling, target.vocab_size, job.prompt, target.device, limits=limits)


class TorchSession:
    """`StepSession`: the steps in the computing thread, and the answer's text here."""

    def __init__(
        self, target: TargetModel, job: EngineRequest, tasks: Tasks, codec: TokenizerAdapter, reader: OutputParser
    ) -> None:
        self._target, self._job, self._tasks, self._reader = target, job, tasks, reader
        self._steps: TorchSteps | None = None
        self._detokenizer = Detokenizer(codec.decoder(job.rules.shown), job.prompt)
        self._scanner = StopScanner(job.sampling.stop)
        self._said = 0
        self._prompt = prompt_of(job, codec) if job.request.return_prompt else None

    async def run(self, play: Callable[[TorchSteps], T]) -> T:
        steps = self._steps or await self._begin()
        return await self._call(lambda: play(steps))

    def tell(self, tokens: Sequence[int]) -> Delta:
        text, told, finish = list[str](), list[int](), None
        for token in tokens:
            told.append(token)
            finish = self._take(token, text)
            if finish is not None:
                text += self._tail()
                break
        usage = Usage(prompt_tokens=len(self._job.prompt), completion_tokens=self._said) if finish else None
        prompt, self._prompt = self._prompt, None
        delta = Delta(text="".join(text), token_ids=tuple(told), finish_reason=finish, usage=usage, prompt=prompt)
        return self._reader.read(delta)

    async def _begin(self) -> TorchSteps:
        """Read the prompt in chunks, so that other requests' steps come between."""
        steps = self._steps = await self._call(lambda: TorchSteps(self._target, self._job))
        while steps.unread:
            await self._call(steps.read)
        return steps

    async def _call(self, function: Callable[[], T]) -> T:
        return await computed(self._tasks, function)

    def _take(self, token: int, text: list[str]) -> FinishReason | None:
        """Add what `token` says to `text`; why the answer ends with it, if it does."""
        self._said += 1
        if token in self._job.stop_ids:
            return "stop"
        piece = self._detokenizer.feed(token)
        text.append(self._scanner.feed(piece) if self._said > self._job.sampling.min_tokens else piece)
        if self._scanner.stopped:
            return "stop"
        return "length" if self._said >= self._job.max_tokens else None

    def _tail(self) -> list[str]:
        """What detokenizer and scanner still hold back, once nothing more will come."""
        if self._scanner.stopped:
            return []
        last = self._scanner.feed(self._detokenizer.finish())
        return [last] if self._scanner.stopped else [last, self._scanner.finish()]


async def computed(tasks: Tasks, function: Callable[[], T]) -> T:
    """What `function` returns in the computing thread. What goes wrong there is an `EngineError`, or one of ours."""
    try:
        return await asyncio.wrap_future(tasks.submit(function))
    except AgentSpecError:
        raise
    except Exception as error:
        logger.error("the engine failed on a step: %s", error_location(error))
        raise EngineError("the engine failed on this request") from error


def states_of(target: TargetModel, texts: Sequence[Sequence[int]]) -> list[Floats]:
    """For each text of token ids its hidden states [tokens, width], all in one forward."""
    if not texts:
        return []
    states = target.states_batch([BatchItem(target.new_rows(len(text)), text) for text in texts])
    return [rows.cpu().numpy() for rows in states]


def prompt_of(job: EngineRequest, codec: TokenizerAdapter) -> Prompt:
    """The prompt as the model reads it."""
    ids, text = tuple(job.prompt), job.request.text
    return Prompt(codec.decode(ids) if text is None else text, ids)


def require_one_answer(request: GenerateRequest) -> None:
    """Raises `InvalidRequestError` for what an answer made by steps does not carry."""
    sampling = request.sampling
    carried = {
        "n": sampling.n == 1,
        "logprobs": not sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs is None,
    }
    for name, can in carried.items():
        if not can:
            raise InvalidRequestError(f"an answer made token by token comes without {name}", param=name)
