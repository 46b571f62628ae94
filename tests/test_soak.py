"""`agentspec serve` under clients of the `openai` package: no error, no wrong token, no leak, a clean end.

Two minutes here, with a tiny model. Full length (ten minutes, 32 clients, the default model) is

    pytest -m "long and model" -s tests/test_soak.py

which SOAK_SECONDS and SOAK_CLIENTS make shorter, longer, lighter or heavier.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.types import SamplingParams

pytest.importorskip("torch")

MIB = 1 << 20
KV_BYTES = 64 * MIB  # full soon, so that what grows afterwards is a leak
TEMPERATURE = 0.8
WARM = 0.4  # the share of the time after which nothing may grow: pools and caches are full
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "pages": {"type": "integer"}},
    "required": ["title", "pages"],
}
TOOLS = [{"type": "function", "function": {"name": "note", "parameters": SCHEMA}}]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA}}},
    "tools": {"tools": TOOLS, "tool_choice": "required"},
}
KINDS = ("plain", "plain", "json", "plain", "plain", "tools")


@dataclass(frozen=True)
class Load:
    """Who asks for how long. `growth` is how many bytes the server may grow by once it is warm."""

    model: str
    seconds: float
    clients: int
    questions: int
    max_tokens: int
    growth: float


@dataclass(frozen=True)
class Ask:
    """A request whose answer is determined: greedy, or sampled with a seed."""

    kind: str
    body: dict[str, Any]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.body["temperature"], seed=self.body["seed"])


@dataclass
class Said:
    """An answer as far as it was read."""

    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    text: str = ""
    calls: str = ""
    finish: str | None = None

    def add(self, body: Any, message: Any) -> None:
        """Take a chunk and its delta, or a whole answer and its message."""
        choice = body.choices[0]
        extra = choice.model_extra or {}
        self.tokens += extra.get("token_ids") or []
        self.prompt += (body.model_extra or {}).get("prompt_token_ids") or []
        self.text += message.content or ""
        for call in message.tool_calls or ():
            self.calls += (call.function.name or "") + (call.function.arguments or "")
        self.finish = choice.finish_reason or self.finish


@dataclass(frozen=True)
class Sample:
    """What the server's process holds at a moment."""

    rss: int
    files: int
    threads: int


@dataclass
class Server:
    """`agentspec serve` as a process of its own."""

    popen: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    @property
    def started(self) -> bool:
        """Whether it listens; fails once the process has ended."""
        said = self.log.read_text()
        assert self.popen.poll() is None and "loading failed" not in said, said
        self.url = "".join(re.findall(r'"url": "(http://[\w.:]+)/v1"', said))
        return bool(self.url)

    def sample(self) -> Sample:
        proc = Path(f"/proc/{self.popen.pid}")
        rss = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Sample(rss, len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")))

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=300).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    @property
    def idle(self) -> bool:
        busy = any(self.metric(f"agentspec_engine_{name}") for name in ("active", "queued", "kv_rows"))
        return not busy and self.metric("agentspec_requests_in_flight") <= 1  # the question itself

    def at_rest(self) -> Sample:
        """What it holds when it has no requests."""
        wait(lambda: self.idle, 300)
        return self.sample()

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@contextmanager
def serving(model: str, folder: Path) -> Iterator[Server]:
    """A server with everything as it is by default but for the folder and the memory of its caches."""
    environment = os.environ | {
        "AGENTSPEC_CACHE_PATH": str(folder / "cache"),
        "AGENTSPEC_BACKENDS__LOCAL__KV_BYTES": str(KV_BYTES),
    }
    command = [Path(sys.executable).with_name("agentspec"), "serve", "--model", model, "--port", "0"]
    log = folder / "log"
    with log.open("wb") as out, subprocess.Popen(command, stderr=out, env=environment, cwd=folder) as popen:
        server = Server(popen, log)
        try:
            wait(lambda: server.started, 300)
            wait(lambda: server.started and httpx.get(f"{server.url}/ready", timeout=300).status_code == 200, 300)
            yield server
        finally:
            popen.kill()


def wait(condition: Any, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.1)


def asks(load: Load) -> list[Ask]:
    """Questions of every kind, half greedy and half sampled; each third goes on with a conversation."""
    texts = [text for pair in zip(load_prompts("edit_short"), load_prompts("control"), strict=False) for text in pair]
    made = []
    for number in range(load.questions):
        messages = [{"role": "user", "content": texts[number % len(texts)]}]
        if number % 3 == 2:
            messages += [{"role": "assistant", "content": "Let me see."}, {"role": "user", "content": "Go on."}]
        kind = KINDS[number % len(KINDS)]
        drawn = {"temperature": TEMPERATURE * (number // 2 % 2), "seed": number, "max_tokens": load.max_tokens}
        made.append(Ask(kind, {"messages": messages, **drawn, **FORMS[kind]}))
    return made


class Soak:
    """Clients that ask `asks` in a random order and ways, and what they found."""

    def __init__(self, server: Server, load: Load) -> None:
        self.server, self.load, self.asks = server, load, asks(load)
        self.references: list[Said] = []
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.parted: list[tuple[Ask, Said, Said]] = []
        self.rests: list[Sample] = []  # before, when warm, after

    async def run(self) -> None:
        async with self._client() as client:
            for ask in self.asks:
                self.references.append(await self._whole(client, ask, {"x-agentspec-speculation": "off"}))
        for share in (WARM, 1 - WARM):
            self.rests.append(await asyncio.to_thread(self.server.at_rest))
            await self._all_play(share * self.load.seconds)
        self.rests.append(await asyncio.to_thread(self.server.at_rest))

    async def _all_play(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._play(number, until) for number in range(self.load.clients)))

    @property
    def lacks(self) -> list[str]:
        """What no client has asked yet."""
        asked = [f"{kind}, {way}" for kind in FORMS for way in ("whole", "streamed")]
        return [one for one in asked if not self.counts[one]] if not self.errors else []

    def _client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=600)

    async def _play(self, number: int, until: float) -> None:
        """One client: it asks at least once, and again and again `until` then."""
        rng, first = random.Random(number), True
        async with self._client() as client:
            while first or time.monotonic() < until or self.lacks:
                first = False
                place = rng.randrange(len(self.asks))
                try:
                    await self._once(client, rng, self.asks[place], self.references[place])
                except openai.OpenAIError as error:
                    self.errors.append(f"{type(error).__name__}: {error}")

    async def _once(self, client: openai.AsyncOpenAI, rng: random.Random, ask: Ask, want: Said) -> None:
        way = rng.choices(("whole", "streamed", "left", "abandoned"), (8, 8, 3, 1))[0]
        if way == "whole":
            self._judge(ask, await self._whole(client, ask), want)
        elif way == "abandoned":
            with suppress(TimeoutError):
                await asyncio.wait_for(self._whole(client, ask), rng.uniform(0.0, 1.0))
        else:
            chunks = rng.randint(1, 6) if way == "left" else None
            self._judge(ask, await self._streamed(client, ask, chunks), want, partly=way == "left")
        self.counts[f"{ask.kind}, {way}"] += 1

    def _judge(self, ask: Ask, got: Said, want: Said, *, partly: bool = False) -> None:
        if partly and got.finish is None:
            same = got.tokens == want.tokens[: len(got.tokens)]
        else:
            same = (got.tokens, got.text, got.calls, got.finish) == (want.tokens, want.text, want.calls, want.finish)
        if not same:
            self.parted.append((ask, got, want))

    async def _whole(self, client: openai.AsyncOpenAI, ask: Ask, headers: dict[str, str] | None = None) -> Said:
        said = Said()
        answer = await self._create(client, ask, extra_headers=headers)
        said.add(answer, answer.choices[0].message)
        return said

    async def _streamed(self, client: openai.AsyncOpenAI, ask: Ask, chunks: int | None) -> Said:
        """The answer, or as much of it as comes in so many chunks, after which the client leaves."""
        said, seen = Said(), 0
        async with await self._create(client, ask, stream=True) as stream:
            async for chunk in stream:
                if chunk.choices:
                    said.add(chunk, chunk.choices[0].delta)
                if (seen := seen + 1) == chunks:
                    break
        return said

    def _create(self, client: openai.AsyncOpenAI, ask: Ask, **fields: Any) -> Any:
        extra = {"return_token_ids": True}
        return client.chat.completions.create(model=self.load.model, extra_body=extra, **ask.body, **fields)

    def wrong(self) -> list[str]:
        """Answers that are neither the reference nor part from it at a near-tie, as docs/engines.md defines it."""
        return [said for ask, got, want in self.parted if (said := self._difference(ask, got, want)) is not None]

    def _difference(self, ask: Ask, got: Said, want: Said) -> str | None:
        from agentspec.backends.torch.exactness import ExactnessCase, first_divergence

        cut = want.tokens if got.finish else want.tokens[: len(got.tokens)]
        if got.tokens == cut:
            return f"{ask.kind}: the same tokens read as {(got.text, got.calls, got.finish)}, not as {want}"
        question = ExactnessCase(want.prompt, ask.sampling)
        found = first_divergence(self._target(), question, "at once", self.asks.index(ask), cut, got.tokens)
        return None if found.is_tie else f"{ask.kind}: {found}"

    def _target(self) -> Any:
        from agentspec.backends.torch.loader import load

        if not hasattr(self, "_loaded"):
            self._loaded = load(TorchSettings(model=self.load.model))
        return self._loaded.target


def soak(load: Load, folder: Path) -> None:
    with serving(load.model, folder) as server:
        trial = Soak(server, load)
        asyncio.run(trial.run())
        _, warm, after = trial.rests
        wait(lambda: server.sample().files <= warm.files and server.sample().threads <= warm.threads, 300)
        served = server.metric("agentspec_engine_forwards_total"), server.metric("agentspec_accepted_tokens_total")
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(300) == 0
        entries = server.entries()
    assert not trial.errors, trial.errors[:5]
    assert not trial.wrong()
    assert not trial.lacks
    assert served[0] > 0 and served[1] > 0
    assert {entry["outcome"] for entry in entries if "outcome" in entry} <= {"ok", "cancelled"}
    assert not [entry for entry in entries if entry["level"] in ("error", "critical")]
    assert after.rss - warm.rss <= load.growth, [round(sample.rss / MIB) for sample in trial.rests]


@pytest.mark.long
def test_c8_two_minutes_of_a_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    soak(Load(str(tiny_model), 120, 8, questions=12, max_tokens=24, growth=16 * MIB), tmp_path)


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_ten_minutes_of_the_default_model(default_model: Any, tmp_path: Path) -> None:
    seconds, clients = float(os.environ.get("SOAK_SECONDS", "600")), int(os.environ.get("SOAK_CLIENTS", "32"))
    soak(Load("smollm2-135m", seconds, clients, questions=24, max_tokens=48, growth=96 * MIB), tmp_path)
