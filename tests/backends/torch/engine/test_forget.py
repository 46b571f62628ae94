"""What is deleted from the cache is gone from the engine too: no KV slot, guess or draft derives from it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.prefix_cache import SHORTEST, PrefixCache
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.cache import SuffixCache
from agentspec.cache.deletion import Reach, select
from agentspec.types import GenerateRequest, Labels, Namespace, SamplingParams
from tests.backends.torch.engine.conftest import slots_of

NAMES = st.sampled_from([None, "s", "t"])
TEXTS = st.tuples(st.sampled_from("ab"), NAMES, st.lists(st.integers(0, 1), min_size=SHORTEST, max_size=24))


def reach(**conditions: Any) -> Reach:
    return Reach(select(**conditions).scope, lambda tenant: Namespace(tenant, "model", "tokenizer", "template"))


def shared(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@given(st.lists(TEXTS, max_size=10), st.sampled_from("ab"), st.sampled_from(["s", "t"]), st.booleans())
def test_only_the_text_of_others_is_found_afterwards(kept: list[Any], tenant: str, session: str, whole: bool) -> None:
    store = PrefixCache()
    for owner, name, tokens in kept:
        store.keep(owner, tokens, slots_of(tokens), session=name)
    store.forget(reach(tenant=tenant) if whole else reach(tenant=tenant, session=session))
    gone = [one for one in kept if one[0] == tenant and (whole or one[1] == session)]
    left = [one for one in kept if one not in gone]
    for owner, _, tokens in kept:
        found = store.known(owner, np.asarray(tokens))
        assert found <= max((shared(tokens, other) for name, _, other in left if name == owner), default=0)
        if owner != tenant:
            assert found == len(tokens)
    assert store.nbytes == sum(node.rows.nbytes for node in store._nodes())
    store.shrink(None)
    assert not store.forgets and (left or not store._roots)


def test_what_is_older_goes_and_what_was_guessed() -> None:
    store, texts = PrefixCache(), [[value] * 20 for value in range(3)]
    for text in texts:
        store.keep("a", text, slots_of(text), guessed=text[0] == 2)
    (old,) = (node for node in store._nodes() if len(node.tokens) and node.tokens[0] == 0)
    old.made = time.time() - 100
    store.forget(reach(older_than=50))
    assert [store.known("a", np.asarray(text)) for text in texts] == [0, 20, 0]
    store.forget(reach(session="nobody's"))
    assert store.known("a", np.asarray(texts[1])) == 20


def ask(one: Any, session: str, step: str, seed: int, tenant: str = "default") -> Any:
    prompt = [*((seed * 31 + place * 7) % 200 for place in range(80)), len(session), seed]
    return one.ask(prompt, 2, tenant=tenant, labels=Labels(session, "flow", step))


@pytest.mark.parametrize("turns", range(4))
def test_an_answer_that_was_open_leaves_nothing_behind(stepped: Any, turns: int) -> None:
    one = stepped()
    answer, other = ask(one, "x", "plan", 1), ask(one, "y", "plan", 2)
    for _ in range(turns):
        one.turn()
    one.engine.forget(reach(session="x"))
    one.run()
    assert answer.last and other.last and answer.error is None
    store = one.scheduler.prefix_cache
    assert store.known("default", np.asarray(other.request.prompt)) == len(other.request.prompt)
    assert store.known("default", np.asarray(answer.request.prompt)) == 0


def test_a_prompt_that_is_being_read_ahead_is_not_kept(stepped: Any) -> None:
    one = stepped()
    one.engine.prefill("default", list(range(100)))
    assert (one.turn() and one.reader._job is not None) or one.scheduler.prefix_cache.nbytes
    one.engine.forget(reach(tenant="default"))
    one.run()
    assert one.scheduler.prefix_cache.nbytes == 0 and one.scheduler.kv_budget.lent == 0


@pytest.mark.parametrize("conditions", [{"session": "x"}, {"tenant": "default"}])
def test_a_deletion_that_comes_while_an_answer_ends_reaches_it(stepped: Any, conditions: Any) -> None:
    one = stepped()

    class Session(CacheSession):
        def close(self, *, clean: bool, ended: bool = True) -> None:
            one.engine.forget(reach(**conditions))
            super().close(clean=clean)

    one.engine._open_session = lambda request: Session(None)
    answer = ask(one, "x", "plan", 1)
    one.run()
    assert answer.last and one.scheduler.prefix_cache.nbytes == 0


def test_a_deletion_that_comes_while_slots_are_kept_leaves_none_that_are_not_found() -> None:
    class Slots(SequenceCache):
        @property
        def slot_bytes(self) -> int:
            store.forget(reach(tenant="a"))
            return super().slot_bytes

    store, first = PrefixCache(), list(range(20))
    store.keep("a", first, slots_of(first))
    second = slots_of([*first, *range(50, 70)])
    second.__class__ = Slots
    store.keep("a", [*first, *range(50, 70)], second, 1 << 20)
    assert store.nbytes == sum(node.rows.nbytes for node in store._nodes())
    store.shrink(None)
    assert store.nbytes == len(store) == 0 and not store._roots


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[list[SuffixCache]]:
    with SuffixCache.open(tmp_path) as first, SuffixCache.open(tmp_path, mode="follower") as second:
        yield [first, second]


PROMPT = "Be kind to all of them, and say what you think of it. " * 2


@pytest.mark.anyio
@pytest.mark.parametrize("process", [0, 1], ids=["here", "elsewhere"])
@pytest.mark.parametrize("conditions", [{"tenant": "a"}, {"session": "s"}], ids=["tenant", "session"])
async def test_after_a_deletion_nothing_is_reused_or_drafted(
    lab: Any, caches: list[SuffixCache], process: int, conditions: Any
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=24)
    request = GenerateRequest("m", text=PROMPT, tenant="a", labels=Labels("s"), sampling=sampling)
    async with AsyncExitStack() as stack:
        backend = TorchBackend(lab.loaded, TorchSettings(), caches[0])
        stack.push_async_callback(backend.aclose)

        async def ended(asked: GenerateRequest) -> Any:
            return [delta async for delta in backend.generate(asked)][-1]

        for _ in range(2):
            await ended(request)
        again = replace(request, labels=Labels("another"))
        reused = await ended(replace(again, store=False))
        assert reused.usage.cached_tokens > 50 and caches[0].stats().sequences
        caches[0].flush()
        caches[process].forget(**conditions)
        if process:
            caches[0]._deleter.maintain()  # as its thread does twice a second
        assert caches[0].stats().sequences == 0
        fresh = await ended(replace(again, store=False))
        assert fresh.usage.cached_tokens == 0
    assert not caches[0]._deleter._listeners


def test_a_listener_that_fails_does_not_stop_the_deletion(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    def fails(scope: Any) -> None:
        raise RuntimeError("secret")

    with SuffixCache.open() as cache:
        end = cache.on_forget(fails)
        cache.on_forget(told.append)
        cache.forget(tenant="a")
        end()
        end()
        cache.forget(session="b")
    assert len(told) == 2 and caplog.text.count("may be left") == 1 and "secret" not in caplog.text
    assert told[0].concerns_tenant("a") and told[1].covers("b", math.inf)
