"""The engine's thread: turns, places, cancellation, errors, shutdown."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.engine import Engine
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest
from agentspec.backends.torch.model.device import is_out_of_memory
from agentspec.cache import SuffixCache
from agentspec.errors import EngineError, EngineStoppedError, ShuttingDownError
from agentspec.speculation.governor import CHUNKS
from agentspec.types import Delta, GenerateRequest, Labels, Namespace, SamplingParams
from tests.backends.torch.engine.conftest import tighten

PROMPT = list(range(20, 40))
WAIT = 30.0


class Client:
    """Submits one request and receives what is delivered."""

    def __init__(
        self, engine: Engine, prompt: list[int] = PROMPT, *, max_tokens: int = 8, seed: int = 0, **params: Any
    ):
        self.items: queue.Queue[Delta | Exception] = queue.Queue()
        self.engine = engine
        sampling = SamplingParams(temperature=1.0, seed=seed)
        request = GenerateRequest("m", token_ids=prompt, sampling=sampling, **params)
        self.request = EngineRequest(request, prompt, max_tokens, frozenset(), None, self.items.put)

    def submit(self) -> Client:
        self.engine.submit(self.request)
        return self

    def result(self) -> tuple[list[int], Delta]:
        tokens: list[int] = []
        while True:
            item = self.items.get(timeout=WAIT)
            if isinstance(item, Exception):
                raise item
            tokens += item.token_ids
            if item.finish_reason:
                return tokens, item


@pytest.fixture
def engine_of(lab: Any) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(
        session: Callable[[EngineRequest], CacheSession] = lambda request: CacheSession(None),
        keeps_prefixes: bool = True,
        **settings: Any,
    ) -> Engine:
        context = EngineContext(lab.target, lab.tokenizer)
        engines.append(Engine(context, TorchSettings(**settings), session, keeps_prefixes=keeps_prefixes))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


class Gate(CacheSession):
    """A place in a cache that holds the engine's thread until it is opened."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reached, self.opened = threading.Event(), threading.Event()

    def extend(self, tokens: Any) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT)


class Broken(CacheSession):
    def __init__(self, error: BaseException) -> None:
        super().__init__(None)
        self.error = error

    def extend(self, tokens: Any) -> None:
        raise self.error


def test_cancelling_frees_a_waiting_and_an_active_place_at_once(engine_of: Any) -> None:
    gate = Gate()
    engine = engine_of(lambda request: gate, max_active=1)
    active, waiting = Client(engine).submit(), Client(engine).submit()
    assert gate.reached.wait(WAIT)
    engine.cancel(waiting.request)
    next_one = Client(engine).submit()
    engine.cancel(active.request)
    after_next = Client(engine).submit()
    gate.opened.set()
    assert len(next_one.result()[0]) == len(after_next.result()[0]) == 8
    assert waiting.items.empty()
    assert engine.context.counters.cancelled == 2


def test_cancelling_in_the_middle_of_a_prompt_or_an_answer_stops_the_work(lab: Any, engine_of: Any) -> None:
    engine = engine_of(max_active=2)
    long = Client(engine, [5] * (2 * CHUNKS[0] - 100), max_tokens=90).submit()
    engine.cancel(long.request)
    answering = Client(engine, max_tokens=400).submit()
    answering.items.get(timeout=WAIT)
    engine.cancel(answering.request)
    engine.cancel(answering.request)
    wait_until(lambda: len(engine.scheduler.active) == 0)
    assert engine.context.counters.tokens < 300
    assert len(engine.scheduler.prefix_cache) == 0  # what was cut is not kept
    want = lab.oracle(PROMPT, SamplingParams(temperature=1.0, seed=0), max_tokens=8, stop_ids=())
    assert Client(engine).submit().result()[0] == want


@pytest.mark.parametrize("error", [ValueError("broken"), MemoryError(), torch.OutOfMemoryError("cuda")])
def test_an_error_in_one_request_is_that_requests_alone(
    engine_of: Any, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    memories = iter([CacheSession(None), Broken(error), CacheSession(None)])
    engine = engine_of(lambda request: next(memories), max_active=3)
    clients = [Client(engine, max_tokens=12).submit() for _ in range(3)]
    with pytest.raises(EngineError) as caught:
        clients[1].result()
    assert caught.value.__cause__ is error
    assert ("out of memory" in str(caught.value)) is is_out_of_memory(error)
    told = str(caught.value) + caplog.text
    assert "broken" not in told and f"{type(error).__name__} at " in told and "test_engine.py" in told
    assert len(clients[0].result()[0]) == len(clients[2].result()[0]) == 12
    assert engine.context.counters.failed == 1


@pytest.mark.parametrize("error", [SystemExit(), torch.AcceleratorError("a device-side assert")])
def test_the_end_of_the_thread_or_its_device_leaves_nobody_waiting(engine_of: Any, error: BaseException) -> None:
    engine = engine_of(lambda request: Broken(error), max_active=1)
    clients = [Client(engine) for _ in range(2)]
    with engine.scheduler._lock:  # both are there before the first turn
        for client in clients:
            client.submit()
    for client in clients:
        with pytest.raises(EngineError, match=type(error).__name__):
            client.result()
    with pytest.raises(EngineStoppedError, match="the process must be restarted"):
        Client(engine).submit()
    assert isinstance(engine.failure, EngineStoppedError)


def test_answers_are_the_same_where_the_cache_learns_beside_the_forwards(lab: Any, engine_of: Any) -> None:
    """Said before, they are drafted when they are asked for again, greedy and sampled, alone and together."""
    samplings = [SamplingParams(temperature=min(seed, 1.0), seed=seed) for seed in range(4)]
    wants = [lab.oracle(PROMPT, sampling, max_tokens=24, stop_ids=()) for sampling in samplings]
    with SuffixCache.open() as cache:
        engine = engine_of(lambda request: late_session(cache, request), max_active=4)
        for together in (False, False, True):
            clients = list[Client]()
            for sampling in samplings:
                clients.append(Client(engine, max_tokens=24, labels=Labels(session=f"{together}")))
                clients[-1].request.original = replace(clients[-1].request.original, sampling=sampling)
                clients[-1].submit()
                assert together or clients[-1].result()[0] == wants[len(clients) - 1]
            assert not together or [client.result()[0] for client in clients] == wants
        assert cache.stats().accepted > 60 and cache.stats().tokens == 3 * 4 * 24


def late_session(cache: SuffixCache, request: EngineRequest) -> CacheSession:
    return CacheSession.open(cache, request.original, request.prompt, Namespace("t", "model"), late=True)


def test_closing_ends_everything_and_refuses_more(engine_of: Any) -> None:
    gate = Gate()
    engine = engine_of(lambda request: gate, max_active=1)
    clients = [Client(engine, max_tokens=400).submit() for _ in range(3)]
    assert gate.reached.wait(WAIT)
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.opened.set()
    for client in clients:
        with pytest.raises(ShuttingDownError):
            client.result()
    closer.join(WAIT)
    engine.close()
    with pytest.raises(ShuttingDownError):
        Client(engine).submit()
    wait_until(lambda: not any(thread.name == "agentspec-cpu" for thread in threading.enumerate()))


def test_the_next_prompt_of_a_conversation_is_not_computed_again(lab: Any, engine_of: Any) -> None:
    engine = engine_of()
    first, last = Client(engine, max_tokens=10).submit().result()
    assert last.usage.cached_tokens == 0
    prompt = [*PROMPT, *first, 1, 2, 3]
    second, last = Client(engine, prompt, max_tokens=10).submit().result()
    assert last.usage.cached_tokens == len(PROMPT) + 9  # the last token of an answer has no row yet
    assert second == lab.oracle(prompt, SamplingParams(temperature=1.0, seed=0), max_tokens=10, stop_ids=())
    _, last = Client(engine, prompt, tenant="other").submit().result()
    assert last.usage.cached_tokens == 0
    assert engine.context.counters.reused_tokens == len(PROMPT) + 9


def test_a_request_that_cannot_begin_gives_its_place_in_the_cache_back(engine_of: Any) -> None:
    closed: list[bool] = []

    class Watched(CacheSession):
        def close(self, *, clean: bool, ended: bool = True) -> None:
            closed.append(clean)

    client = Client(engine_of(lambda request: Watched(None)))
    beyond = SamplingParams(logit_bias={10**6: 1.0})  # which the backend would have refused
    client.request.original = GenerateRequest("m", token_ids=PROMPT, sampling=beyond)
    with pytest.raises(EngineError):
        client.submit().result()
    assert closed == [False]


ROW_BYTES = 256  # of the tiny model


def test_answers_that_do_not_fit_together_are_put_back_and_go_on_where_they_stood(lab: Any, engine_of: Any) -> None:
    """Room for two that begin, not for two that grow; who came first keeps its place."""
    engine = engine_of(kv_bytes=ROW_BYTES * 160, max_active=4, keeps_prefixes=False)
    prompts = [[*PROMPT[: 8 + n], n] for n in range(3)]
    clients = [Client(engine, prompt, seed=n, max_tokens=70 + n) for n, prompt in enumerate(prompts)]
    tighten(engine, 160)
    for client in clients:
        client.submit()
    for n, client in enumerate(clients):
        sampling = SamplingParams(temperature=1.0, seed=n)
        lab.require_same(prompts[n], sampling, client.result()[0], lab.oracle(
            prompts[n], sampling, max_tokens=70 + n, stop_ids=()
        ))  # fmt: skip
    assert engine.context.counters.preempted >= 1
    assert engine.scheduler.kv_slots == 0


def test_what_was_put_back_can_be_cancelled(engine_of: Any) -> None:
    closed: list[bool] = []
    gate = Gate()
    gate.close = lambda *, clean, ended: closed.append(clean)  # type: ignore[method-assign]
    engine = engine_of(lambda request: gate if request.original.priority else CacheSession(None))
    tighten(engine, 2 * len(PROMPT) + 100)
    slow = Client(engine, max_tokens=30, priority=5).submit()
    assert gate.reached.wait(WAIT)
    urgent = Client(engine, [2, *PROMPT], max_tokens=30, priority=0).submit()
    gate.opened.set()
    urgent.items.get(timeout=WAIT)
    engine.cancel(slow.request)
    urgent.result()
    wait_until(lambda: not engine.ready)
    assert engine.context.counters.preempted == 1 and closed == [False]
    assert (len(engine.scheduler.active), engine.scheduler.num_waiting) == (0, 0)


def test_two_engines_compute_in_one_thread_and_take_turns(lab: Any, engine_of: Any) -> None:
    engines = [engine_of(), engine_of()]
    names: set[str] = set()

    class Told(CacheSession):
        def extend(self, tokens: Any) -> None:
            names.add(f"{threading.current_thread().name}-{threading.get_ident()}")

    for engine in engines:
        engine._open_session = lambda request: Told(None)
    clients = [Client(engine, max_tokens=40).submit() for engine in engines for _ in range(2)]
    want = lab.oracle(PROMPT, SamplingParams(temperature=1.0, seed=0), max_tokens=40, stop_ids=())
    assert [client.result()[0] for client in clients] == [want] * 4
    assert len(names) == 1
    engines[0].close()
    assert Client(engines[1], max_tokens=40).submit().result()[0] == want


def test_an_answer_not_to_be_stored_leaves_no_rows(engine_of: Any) -> None:
    engine = engine_of()
    Client(engine, store=False).submit().result()
    assert len(engine.scheduler.prefix_cache) == 0
