"""What is deleted from the cache is gone from the engine too: no KV slot, guess or draft derives from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.cache import SuffixCache
from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams

pytestmark = pytest.mark.anyio

TEXT = "Be kind to all of them, and say what you think of it. " * 2
ASKED = GenerateRequest(
    "m", text=TEXT, tenant="a", labels=Labels("s"), sampling=SamplingParams(temperature=0, max_tokens=24)
)
OTHER = replace(ASKED, labels=Labels("another"), store=False)
SCOPES: list[dict[str, Any]] = [{"tenant": "a"}, {"session": "s"}]


@pytest.fixture
async def opened(lab: Any, tmp_path: Path) -> AsyncIterator[tuple[TorchBackend, list[SuffixCache]]]:
    """A backend with the first of two caches that share a folder."""
    async with AsyncExitStack() as stack:
        modes: tuple[Any, ...] = ("writer", "follower")
        caches = [stack.enter_context(SuffixCache.open(tmp_path, mode=mode)) for mode in modes]
        backend = TorchBackend(lab.loaded, TorchSettings(), caches[0])
        stack.push_async_callback(backend.aclose)
        yield backend, caches


async def ended(backend: TorchBackend, request: GenerateRequest) -> Delta:
    return [delta async for delta in backend.generate(request)][-1]


@pytest.mark.parametrize("process", [0, 1], ids=["here", "elsewhere"])
@pytest.mark.parametrize("scope", SCOPES, ids=["tenant", "session"])
async def test_after_a_deletion_nothing_is_reused_or_drafted(opened: Any, process: int, scope: Any) -> None:
    backend, caches = opened
    for _ in range(2):
        await ended(backend, ASKED)
    reused = await ended(backend, OTHER)
    assert reused.usage.cached_tokens > 50 and caches[0].stats().sequences
    caches[0].flush()
    caches[process].forget(**scope)
    if process:
        caches[0]._deleter.maintain()  # as its thread does twice a second
    assert caches[0].stats().sequences == 0
    fresh = await ended(backend, OTHER)
    assert fresh.usage.cached_tokens == 0


@pytest.mark.parametrize("deltas", [1, 5, 100])
@pytest.mark.parametrize("scope", SCOPES, ids=["tenant", "session"])
async def test_an_answer_that_was_open_leaves_nothing_behind(opened: Any, deltas: int, scope: Any) -> None:
    """Wherever the deletion comes; what another session asked meanwhile stays where only a session was deleted."""
    backend, (cache, _) = opened
    stream, seen = backend.generate(ASKED), 0
    elsewhere = replace(ASKED, text=f"Not so. {TEXT}", labels=Labels("t"))
    while seen < deltas and await anext(stream, None) is not None:
        seen += 1
    await ended(backend, elsewhere)
    cache.forget(**scope)
    async for _ in stream:
        pass
    assert (await ended(backend, OTHER)).usage.cached_tokens == 0
    kept = await ended(backend, replace(elsewhere, labels=Labels("u"), store=False))
    assert (kept.usage.cached_tokens > 50) is ("session" in scope)


@pytest.mark.parametrize("scope", SCOPES, ids=["tenant", "session"])
async def test_a_deletion_that_comes_while_an_answer_ends_reaches_it(
    opened: Any, scope: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer's record in the cache is closed, then its slots are stored: the deletion comes between."""
    backend, (cache, _) = opened
    with cache.request([1], store=False) as request:
        kind, close = type(request), type(request).close

    def forgetting(record: Any, **how: Any) -> None:
        close(record, **how)
        cache.forget(**scope)

    monkeypatch.setattr(kind, "close", forgetting)
    await ended(backend, ASKED)
    monkeypatch.undo()
    assert (await ended(backend, OTHER)).usage.cached_tokens == 0


def test_a_listener_that_fails_does_not_stop_the_deletion(caplog: pytest.LogCaptureFixture) -> None:
    reported: list[Any] = []

    def fails(scope: Any) -> None:
        raise RuntimeError("secret")

    with SuffixCache.open() as cache:
        end = cache.on_forget(fails)
        cache.on_forget(reported.append)
        cache.forget(tenant="a")
        end()
        end()
        cache.forget(session="b")
    assert len(reported) == 2 and caplog.text.count("may be left") == 1 and "secret" not in caplog.text
