"""I10: with pacing on, the shape of a stream does not tell accepted drafts from rejected ones.

The gateway runs on a clock of its own: a model that decodes takes no real time, and every run is the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from itertools import pairwise
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest, Speculation, Usage

pytestmark = pytest.mark.reliability

PROMPTS = 50
STEP = 0.02  # seconds of a step without drafts
MARGIN = 0.05  # above chance
PACING = {"stream_pacing": 0.1, "stream_pacing_characters": 12}
Trace = list[tuple[int, int]]
"""Milliseconds since the first event, and bytes, of each event."""


class Decoder(FakeBackend):
    """Decodes a fixed answer for each prompt, with times by the request's seed. Where the message ends in "hit", drafts
    are accepted.
    """

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        prompt = str((request.messages or [{}])[-1]["content"])
        number, _, kind = prompt.partition(" ")
        words = answer(int(number))
        noise = random.Random(f"{prompt} {request.sampling.seed}")
        drafted, position = 0, 0
        await anyio.sleep(0.1)
        while position < len(words):
            step = noise.choice((1, 1, 2, 4, 8)) if kind == "hit" else 1
            yield Delta(text="".join(words[position : position + step]), token_ids=tuple(range(step)))
            position, drafted = position + step, drafted + step - 1
            await anyio.sleep(STEP * (1 + noise.random() * 0.2 + 0.02 * (step - 1)))
        usage = Usage(10, len(words))
        yield Delta(finish_reason="stop", usage=usage, speculation=Speculation(drafted, drafted, len(words) - drafted))


def answer(number: int) -> list[str]:
    words = random.Random(number)
    return [" " + "abcdefg"[: words.randint(3, 7)] for _ in range(words.randint(40, 80))]


class Gateway:
    """The whole gateway, called without a server, by a clock that jumps."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], **server: Any) -> None:
        self._run = run
        settings = Settings(server=ServerSettings(**server), backends={})
        runtime = Runtime(settings, backends={"m": Decoder()})
        runtime.start()
        self.app = create_app(runtime, settings)

    def trace(self, prompt: str, seed: int) -> tuple[Trace, str]:
        """What an eavesdropper sees of one stream, and the text that the client reads."""
        seen: tuple[Trace, str] = self._run(self._stream(prompt, seed))
        return seen

    async def _stream(self, prompt: str, seed: int) -> tuple[Trace, str]:
        asked = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True, "seed": seed}
        messages = iter([{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}])
        seen: list[tuple[float, bytes]] = []
        loop = asyncio.get_running_loop()

        async def receive() -> Any:
            return next(messages, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message.get("body"):
                seen.append((loop.time(), message["body"]))

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        path = "/v1/chat/completions"
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b""}
        scope["headers"] = headers
        await self.app(scope, receive, send)
        first = seen[0][0]
        return [(round(1000 * (at - first)), len(data)) for at, data in seen], text_of(b"".join(d for _, d in seen))


def text_of(stream: bytes) -> str:
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def features(trace: Trace, length: int = 64) -> NDArray[np.float64]:
    """Sizes and gaps of the first events, and what sums them all up."""
    times, sizes = np.array(trace, dtype=float).T
    gaps = np.diff(times, prepend=times[0])
    shape = [np.pad(values[:length], (0, length - len(values[:length]))) for values in (gaps, sizes)]
    sums = [len(times), times[-1], sizes.sum(), sizes.std(), sizes.max(), gaps.std(), gaps.max(), gaps.mean()]
    return np.concatenate((*shape, sums))


def collected(gateway: Gateway, runs: int, prompts: int = PROMPTS) -> NDArray[np.float64]:
    """Features by prompt, by miss (0) or hit (1), and by run."""
    rows = []
    for number in range(prompts):
        kinds = []
        for kind in ("miss", "hit"):
            traces = [gateway.trace(f"{number} {kind}", seed) for seed in range(runs)]
            assert {text for _, text in traces} == {"".join(answer(number))}
            kinds.append([features(trace) for trace, _ in traces])
        rows.append(kinds)
    return np.array(rows)


def nearest_neighbour(seen: NDArray[np.float64]) -> float:
    """How often the nearest known trace has the right label; the attacker knows one run of every prompt, both ways."""
    known = seen[:, :, 0].reshape(-1, seen.shape[-1])
    labels = np.tile([0, 1], len(seen))
    spread = known.std(axis=0) + 1e-9
    right = []
    for kind in (0, 1):
        for trace in seen[:, kind, 1:].reshape(-1, seen.shape[-1]):
            distances = np.abs((known - trace) / spread).sum(axis=1)
            nearest = labels[distances <= distances.min() + 1e-9]  # of equally near ones the attacker picks any
            right.append(float(np.mean(nearest == kind)))
    return float(np.mean(right))


def linear(seen: NDArray[np.float64]) -> float:
    """How often a ridge classifier is right about prompts that it was not trained on (five folds)."""
    right = []
    for fold in range(5):
        held_out = np.arange(len(seen)) % 5 == fold
        train, test = seen[~held_out], seen[held_out]
        rows = train.reshape(-1, seen.shape[-1])
        mean, spread = rows.mean(axis=0), rows.std(axis=0) + 1e-9
        signs = np.broadcast_to(np.array([-1.0, 1.0])[None, :, None], train.shape[:3]).reshape(-1)
        scaled = (rows - mean) / spread
        weights = np.linalg.solve(scaled.T @ scaled + 10 * np.eye(scaled.shape[1]), scaled.T @ signs)
        scores = (test - mean) / spread @ weights
        hits, misses = scores[:, 1].ravel(), scores[:, 0].ravel()
        right += [np.mean(hits > 1e-9), np.mean(misses <= 1e-9)]
    return float(np.mean(right))


@pytest.mark.parametrize(("runs", "prompts"), [(2, 20), pytest.param(20, PROMPTS, marks=pytest.mark.long)])
def test_i10_paced_streams_look_alike_whether_drafts_are_accepted_or_not(
    runs: int, prompts: int, in_virtual_time: Any
) -> None:
    seen = collected(Gateway(in_virtual_time, **PACING), runs, prompts)
    assert nearest_neighbour(seen) <= 0.5 + MARGIN
    assert linear(seen) <= 0.5 + MARGIN


def test_i10_without_pacing_the_same_attack_tells_them_apart(in_virtual_time: Any) -> None:
    """So the test above has the power to find a leak; pacing is off by default, and this is what that means."""
    assert ServerSettings().stream_pacing == 0
    seen = collected(Gateway(in_virtual_time), 2, 20)
    assert nearest_neighbour(seen) > 0.95 and linear(seen) > 0.95


def test_i10_a_paced_stream_is_a_metronome(in_virtual_time: Any) -> None:
    """Every event but the end has one size, and every gap one length."""
    trace, _ = Gateway(in_virtual_time, **PACING).trace("7 hit", 0)
    assert {size for _, size in trace[:-2]} == {trace[0][1]}
    assert {late - early for (early, _), (late, _) in pairwise(trace[:-1])} == {100}


@pytest.mark.long
def test_i10_over_real_sockets_and_by_a_real_clock(gateway: Any) -> None:
    """The same, where the machine adds its own unevenness; within what chance gives to so few streams."""
    url = gateway({"m": Decoder()}, **PACING).url + "/v1/chat/completions"
    runs, at_once = 4, 20

    async def trace(client: httpx.AsyncClient, number: int, kind: str, seed: int) -> NDArray[np.float64]:
        prompt = [{"role": "user", "content": f"{number} {kind}"}]
        seen: list[tuple[float, int]] = []
        asked = {"model": "m", "messages": prompt, "stream": True, "seed": seed}
        async with gate, client.stream("POST", url, json=asked) as response:
            async for data in response.aiter_raw():
                seen.append((time.perf_counter(), len(data)))
        return features([(round(1000 * (at - seen[0][0])), size) for at, size in seen])

    async def all_traces() -> NDArray[np.float64]:
        async with httpx.AsyncClient(timeout=120) as client:
            wanted = [(n, kind, run) for n in range(PROMPTS) for kind in ("miss", "hit") for run in range(runs)]
            rows = await asyncio.gather(*(trace(client, *each) for each in wanted))
        return np.array(rows).reshape(PROMPTS, 2, runs, -1)

    gate = asyncio.Semaphore(at_once)
    seen = asyncio.run(all_traces())
    by_chance = 2 * np.sqrt(0.25 / (PROMPTS * 2 * (runs - 1)))
    assert nearest_neighbour(seen) <= 0.5 + MARGIN + by_chance
    assert linear(seen) <= 0.5 + MARGIN + by_chance
