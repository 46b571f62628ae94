"""Total speed of requests that run at once against the same requests one after another, speculation off and on.

Each round takes prompts of its own and asks them under all four variants in an order that rotates, so that a busy
machine hits all of them alike; a pair is one round under two variants. Answers are greedy, time is wall time including
the reading of prompts, and each round drafts from an empty cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks.decode import PREFIX_BYTES_OFF, Run, Table
from agentspec.benchmarks.stats import rotated
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

OFF_ALONE, OFF_AT_ONCE = "off, one at a time", "off, at once"
ON_ALONE, ON_AT_ONCE = "on, one at a time", "on, at once"
VARIANTS = {
    OFF_ALONE: (False, False),
    OFF_AT_ONCE: (False, True),
    ON_ALONE: (True, False),
    ON_AT_ONCE: (True, True),
}

Progress = Callable[[str], None]


def run_concurrency(
    model: str, *, clients: int, rounds: int, max_tokens: int, progress: Progress = lambda message: None
) -> Table:
    """One run for each round and variant, with the tokens of all its answers. Raises what the backend raises."""
    from agentspec.backends.torch import TorchBackend
    from agentspec.cache import SuffixCache

    progress(f"loading {model}")
    settings = TorchSettings(model=model, prefix_bytes=PREFIX_BYTES_OFF, max_active=clients)  # type: ignore[arg-type]
    backend = TorchBackend.load(settings, cache=SuffixCache.open())
    try:
        return asyncio.run(_measure(backend, clients, rounds, max_tokens, progress))
    finally:
        asyncio.run(backend.aclose())


async def _measure(backend: TorchBackend, clients: int, rounds: int, max_tokens: int, progress: Progress) -> Table:
    table = Table(f"{clients} requests at once")
    texts = load_prompts("edit_warm")
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for index in range(rounds):
        progress(f"round {index + 1} of {rounds}")
        start = index * clients
        prompts = [_encoded(backend, texts[(start + place) % len(texts)]) for place in range(clients)]
        for name, (speculation, at_once) in rotated(VARIANTS, index):
            requests = [
                GenerateRequest(
                    backend.model_name,
                    token_ids=prompt,
                    sampling=sampling,
                    tenant=f"{name}: {index}",
                    speculation=speculation,
                    store=False,
                )
                for prompt in prompts
            ]
            table.add(name, await _timed(backend, requests, at_once=at_once))
    return table


async def _timed(backend: TorchBackend, requests: Sequence[GenerateRequest], *, at_once: bool) -> Run:
    started = time.perf_counter()
    if at_once:
        answers = await asyncio.gather(*(_answer(backend, request) for request in requests))
    else:
        answers = [await _answer(backend, request) for request in requests]
    seconds = time.perf_counter() - started
    return Run(tuple(token for answer in answers for token in answer), seconds)


async def _answer(backend: TorchBackend, request: GenerateRequest) -> list[int]:
    return [token async for delta in backend.generate(request) for token in delta.token_ids]


def _encoded(backend: TorchBackend, text: str) -> list[int]:
    return backend.encode_chat([{"role": "user", "content": text}])
