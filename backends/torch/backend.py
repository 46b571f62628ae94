"""The local engine as a `Backend`: takes requests and yields deltas without blocking the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.base import Capabilities, Floats
from agentspec.backends.settings import TorchSettings
from agentspec.backends.threads import TenantThreads
from agentspec.backends.torch.drafters.draft_model import DraftModel
from agentspec.backends.torch.engine.cache_session import CacheHealth, CacheSession
from agentspec.backends.torch.engine.choices import Choices
from agentspec.backends.torch.engine.compute_thread import compute_thread
from agentspec.backends.torch.engine.delivery import Inbox
from agentspec.backends.torch.engine.engine import Engine
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest, prompt_length
from agentspec.backends.torch.engine.stats import EngineStats, snapshot
from agentspec.backends.torch.engine.tasks import Tasks, computed, on_own_thread
from agentspec.backends.torch.loader import LoadedModel, load, load_draft, measure_costs
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.backends.torch.stepwise import TorchSession, VectorScan, require_one_answer, states_of
from agentspec.backends.torch.text.model_text import ModelTokens, ids_of_end
from agentspec.backends.torch.text.structured_output import OutputParser, StructuredOutput, StructuredOutputBuilder
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.cache import SuffixCache
from agentspec.cache.deletion import Reach, Scope
from agentspec.errors import ContextLengthError, EngineStoppedError, InvalidRequestError
from agentspec.prediction import TOKEN_CHARACTERS
from agentspec.telemetry.samples import EngineSample
from agentspec.types import DEFAULT_TENANT, Delta, GenerateRequest, Namespace

if TYPE_CHECKING:
    from agentspec.backends.torch.engine.prefill import NextTurns

logger = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_MAX_TOKENS = 1024  # of an answer to a request that names none
LONG_PROMPT = 1 << 16  # characters
LONG_PROMPT_THREADS = 2


class TorchBackend(ModelTokens):
    """Generates with a Hugging Face model in this process and drafts from the token cache `cache`.

    The caller owns the cache: `aclose` does not close it. Without one, an answer is drafted from its own text alone;
    and always from its `prediction` and by the draft model `small`, if there are any. Without `keeps_prefixes` each
    prompt is computed whole, whatever was computed before.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: TorchSettings,
        cache: SuffixCache | None = None,
        small: DraftModel | None = None,
        *,
        keeps_prefixes: bool = True,
    ) -> None:
        self.settings = settings
        self.model_name = loaded.name
        self.context_length = loaded.target.context_length
        self.tokenizer: Any = loaded.tokenizer
        self._loaded = loaded
        self._namespace = loaded.namespace(DEFAULT_TENANT)
        self._stores = cache is not None
        self._cache = cache or SuffixCache.open()
        self._cache_health = CacheHealth()
        self._tokenizer = TokenizerAdapter(loaded.tokenizer)
        self._stop_ids = ids_of_end(loaded.target.module.generation_config, loaded.tokenizer)
        self._structured_outputs = StructuredOutputBuilder(self._tokenizer, loaded.target.vocab_size, self._stop_ids)
        context = EngineContext(
            loaded.target,
            self._tokenizer,
            max_draft_tokens=settings.max_draft_tokens,
            spec_decode_metrics=settings.per_request_spec_decode_metrics,
            draft_model=small,
        )
        if settings.max_draft_tokens:
            logger.info("measuring how long forwards of %s take", loaded.name)
            context.governor.cost.calibrate(*measure_costs(loaded.target))
        self._engine = Engine(
            context, settings, lambda one: self._cache_session(one.original, one.prompt), keeps_prefixes=keeps_prefixes
        )
        self._end_listening = self._cache.on_forget(self._forget)
        self._tasks = Tasks(compute_thread(loaded.target.device), device_failed=self._engine.device_failed)
        self._long_prompts = TenantThreads(LONG_PROMPT_THREADS, "agentspec-prompt")
        self._next_turns: NextTurns | None = None

    @classmethod
    def load(
        cls, settings: TorchSettings, *, cache: SuffixCache | None = None, keeps_prefixes: bool = True
    ) -> TorchBackend:
        """Find and read the model (blocking, seconds). Raises `ModelUnavailableError` and `ConfigurationError`."""

        def build() -> TorchBackend:
            loaded = load(settings)
            return cls(loaded, settings, cache, load_draft(settings, loaded), keeps_prefixes=keeps_prefixes)

        return on_own_thread(build)

    @property
    def failure(self) -> EngineStoppedError | None:
        """Set once the device failed: the process must be restarted."""
        return self._engine.failure

    @property
    def target(self) -> TargetModel:
        """The model; the engine's thread owns it while requests run."""
        return self._loaded.target

    def namespace(self, tenant: str) -> Namespace:
        """Where the cache keeps the tenant's tokens of this model."""
        return self._loaded.namespace(tenant)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            token_ids=True,
            continue_final=True,
            logprobs=True,
            speculation=self.settings.max_draft_tokens > 0,
            context_length=self.context_length,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Yield the answer step by step; closing the iterator cancels the request. Of several choices, the delta that
        ends the last has the totals.

        Raises `InvalidRequestError` or `ContextLengthError` for a request that cannot be generated, `EngineError` when
        this request fails, `EngineStoppedError` once the device failed, and `ShuttingDownError` when the engine is
        closed.
        """
        self._engine.require_running()
        watch = self._watch_of(request)
        requests, parsers = await self._prepared(request)
        inbox, choices = Inbox(), Choices(len(requests)) if len(requests) > 1 else None
        for one in requests:
            one.deliver = partial(self._deliver, inbox, one)
        try:
            self._engine.submit(requests[0])
            waiting, done = requests[1:], False  # until the first choice has read the prompt and left its KV slots
            while not done:
                for one, delta in await inbox.get():
                    if isinstance(delta, Exception):
                        raise delta
                    if choices is None:
                        done = delta.finish_reason is not None
                    else:
                        for other in waiting:
                            self._engine.submit(other)
                        waiting = []
                        delta = choices.add(delta, one.constraints.choice)
                        done = choices.done
                    parsed = parsers[delta.index].parse(delta) if parsers else delta
                    if watch is not None:
                        watch(parsed)
                    yield parsed
        finally:
            for one in requests:
                self._engine.cancel(one)

    def _deliver(self, inbox: Inbox, request: EngineRequest, item: Delta | Exception) -> None:
        if not inbox.put(request, item):  # the loop is closed: no client reads the answer any more
            self._engine.cancel(request)

    def _watch_of(self, request: GenerateRequest) -> Callable[[Delta], None] | None:
        """What is to be called with each delta of the answer, so that the turn after its tool calls is read ahead."""
        wanted = request.store and self._engine.scheduler.keeps_prefixes
        if not (wanted and request.tools and request.sampling.n == 1):
            return None
        if self._next_turns is None:
            from agentspec.backends.torch.engine.prefill import NextTurns

            self._next_turns = NextTurns(self._engine, self._tokenizer, self._off_the_loop)
        return self._next_turns.watch(request)

    async def record(self, request: GenerateRequest, token_ids: Sequence[int]) -> None:
        """Store `token_ids` in the token cache as the answer to the prompt of token ids in `request`."""
        if request.store:
            session = self._cache_session(request, request.token_ids or ())
            await asyncio.to_thread(session.record, token_ids)

    @property
    def fingerprint(self) -> str:
        """A hash that identifies the weights."""
        return self._loaded.fingerprint

    async def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[Floats]:
        """The hidden states of each text of token ids: what the output head reads after every token, [tokens, width]
        in float32.

        All texts share one forward. Raises `ContextLengthError` if a text is too long.
        """
        self._engine.require_running()
        if any(len(text) > self.context_length for text in texts):
            raise ContextLengthError(f"a text is longer than the model's {self.context_length} tokens")
        for text in texts:
            self._check_ids(text, "prompt")
        return await computed(self._tasks, lambda: states_of(self.target, texts, self._engine.lend))

    async def open_steps(self, request: GenerateRequest) -> TorchSession:
        """Open an answer that the caller decodes token by token.

        Raises `InvalidRequestError` and `ContextLengthError`.
        """
        self._engine.require_running()
        require_one_answer(request)
        (first, *_), parsers = await self._prepared(request)
        parser = parsers[0] if parsers else None
        return TorchSession(self.target, first, self._tasks, self._tokenizer, parser, self._engine.lend)

    async def open_scan(self, rows: NDArray[np.float16]) -> VectorScan:
        """Copy `rows` [n, width] to the model's device, in float32."""
        return await computed(self._tasks, lambda: VectorScan(rows, self.target.device))

    def _forget(self, scope: Scope) -> None:
        """Something was deleted from the cache: reuse nothing that derives from it."""
        self._engine.forget(Reach(scope, self.namespace))

    async def aclose(self) -> None:
        self._end_listening()
        if self._next_turns is not None:
            await self._next_turns.aclose()
        self._tasks.close()
        self._long_prompts.close()
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._structured_outputs.close)
        if not self._stores:
            self._cache.close()

    async def _prepared(self, request: GenerateRequest) -> tuple[list[EngineRequest], list[OutputParser]]:
        """An engine request for each choice, and its answer's parser; no parsers if the text is the answer as it is.
        Long prompts share few threads, of which one tenant never takes the last; large grammars wait for each other
        alone.
        """
        first, output = await self._off_the_loop(request, partial(self._prepare, request))
        if output is None:
            constraints, parsers = [ConstraintSpec(choice=choice) for choice in range(request.sampling.n)], []
        else:
            source = output.source
            grammar = None if source is None else await self._structured_outputs.compiled(request.tenant, source)
            constraints = output.constraints(request.sampling.n, grammar)
            parsers = [output.parser_spec.parser() for _ in constraints]
        choices = [replace(first, constraints=each) for each in constraints]
        choices[0].shares_prompt = len(choices) > 1
        return choices, parsers

    def _needs_form(self, request: GenerateRequest) -> bool:
        """Whether the answer has a form to keep to, or may hold marks that a parser looks for."""
        sampling = request.sampling
        formed = request.tools or sampling.structured_outputs or sampling.bad_words
        return bool(formed) or (request.messages is not None and self._structured_outputs.finds_marks)

    async def _off_the_loop(self, request: GenerateRequest, prepare: Callable[[], T]) -> T:
        if prompt_length(request) + len(request.prediction or "") > LONG_PROMPT:
            return await self._long_prompts.run(request.tenant, prepare)
        return await asyncio.to_thread(prepare)

    def _prepare(self, request: GenerateRequest) -> tuple[EngineRequest, StructuredOutput | None]:
        """Tokenize and check a request. Returns an engine request without constraints, and the form of its answers
        if they have one.

        Raises `InvalidRequestError` whose `param` names the wrong parameter, and `ContextLengthError`.
        """
        text, prompt = self._tokenizer.read(request, self.context_length)
        sampling = request.sampling
        self._check_ids(prompt, "prompt")
        self._check_ids(list(sampling.logit_bias), "logit_bias")
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        if not prompt:
            raise InvalidRequestError("the prompt must hold at least one token", param="prompt")
        most = self._max_tokens(request, len(prompt))  # before a grammar is compiled for a prompt that does not fit
        output = self._structured_outputs.build(request, text) if self._needs_form(request) else None
        first = EngineRequest(
            original=request,
            prompt=prompt,
            max_tokens=most,
            stop_ids=(frozenset() if sampling.ignore_eos else self._stop_ids) | set(sampling.stop_token_ids),
            prediction=self._predicted(request.prediction, most),
            deliver=lambda item: None,
        )
        return first, output

    def _predicted(self, text: str | None, most: int) -> list[int] | None:
        """The tokens of a predicted answer, no more than the answer may have; what lies behind is not even read."""
        return None if text is None else self._tokenizer.encode(text[: most * TOKEN_CHARACTERS])[:most]

    def sample(self, name: str) -> EngineSample:
        """The part of `stats` that the gateway's metrics show."""
        stats = self.stats()
        return EngineSample(
            name,
            queued=stats.queued,
            active=stats.active,
            drafted=stats.drafted_by_source,
            accepted=stats.accepted_by_source,
            forwards=stats.batch_sizes,
            rows=stats.kv_rows,
            draft_failures=stats.draft_failures,
            draft_lengths=stats.draft_lengths,
            prefills=stats.prefills,
        )

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters and state."""
        return snapshot(self._engine.context.counters, self._engine.scheduler)

    def _cache_session(self, request: GenerateRequest, prompt: Sequence[int]) -> CacheSession:
        request = request if self._stores else replace(request, store=False)
        wanted = request.store or (request.speculation and self.capabilities.speculation)
        namespace, cache = replace(self._namespace, tenant=request.tenant), self._cache if wanted else None
        return CacheSession.open(cache, request, prompt, namespace, self._tokenizer.decode, health=self._cache_health)

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._loaded.target.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(f"token id {wrong!r} is not below the model's {vocab_size}", param=param)

    def _max_tokens(self, request: GenerateRequest, prompt: int) -> int:
        sampling, room = request.sampling, self.context_length - prompt
        least = max(1, sampling.min_tokens) if sampling.max_tokens is None else sampling.max_tokens
        if least > room:
            # In Anthropic's words, by which agents shorten their prompt, or ask again for fewer tokens.
            message = f"prompt is too long: {prompt} tokens > {self.context_length} maximum"
            if room > 0:
                exceeded = "input length and `max_tokens` exceed context limit"
                message = f"{exceeded}: {prompt} + {least} > {self.context_length}; ask for at most {room} tokens"
            raise ContextLengthError(message, param="messages" if request.messages is not None else "prompt")
        return min(max(DEFAULT_MAX_TOKENS, least), room) if sampling.max_tokens is None else least
