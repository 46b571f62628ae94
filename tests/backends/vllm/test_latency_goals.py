"""A real vLLM server with our drafter drafts more for calls that are late, and says the same. Needs `.ci/vllm-env`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from agentspec.backends.model_store import locate
from agentspec.backends.settings import OpenAISettings
from agentspec.benchmarks.vllm.engine import find_environment
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.types import Delta, GenerateRequest, SamplingParams
from tests.vllm_server import SUFFIX, VllmServer

ENVIRONMENT = find_environment(Path(__file__).parents[3])

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV"),
]

PROMPTS = load_prompts("edit_short")[:8]
ROUNDS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=96)
LATE = 0.01  # milliseconds per token that no server keeps
EASY = 60_000.0  # that every server keeps
MOST_TIES = 0.2  # of the answers, which part where two tokens are about as likely: batches differ


@dataclass(slots=True)
class Counted:
    """What the server counted over some rounds: tokens that were drafted, and drafts; the answers of each round."""

    drafted: float
    drafts: float
    answers: list[list[str]]

    @property
    def length(self) -> float:
        return self.drafted / self.drafts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Keeps nothing between calls: each round drafts from its own prompts."""
    model = locate("smollm2-135m")
    if model is None or ENVIRONMENT is None:
        pytest.skip("the default model is not there: run agentspec model fetch smollm2-135m")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    variables = {"AGENTSPEC_CACHE__STORE": "false"}
    with VllmServer(ENVIRONMENT, model.folder, log, SUFFIX, variables, ("--enforce-eager",)) as started:
        yield started


def counters(server: VllmServer) -> tuple[float, float]:
    """(tokens drafted, drafts) so far."""
    return server.metric("vllm:spec_decode_num_draft_tokens_total"), server.metric("vllm:spec_decode_num_drafts_total")


async def say(runtime: Runtime, goal: float | None) -> list[str]:
    """The answers to all prompts, asked at once with this goal."""

    async def one(prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        request = GenerateRequest("model", messages=[message], sampling=GREEDY, latency_target_ms_per_token=goal)
        deltas: list[Delta] = [delta async for delta in runtime.generate(request)]
        return "".join(delta.text for delta in deltas)

    return await asyncio.gather(*map(one, PROMPTS))


async def measured(server: VllmServer, kinds: Sequence[float | None]) -> list[Counted]:
    """For each kind of goal what was counted in `ROUNDS` rounds in which all calls have it; rounds take turns."""
    found = [Counted(0, 0, []) for _ in kinds]
    endpoint = OpenAISettings(base_url=f"{server.url}/v1")  # type: ignore[arg-type]
    async with Runtime(Settings(backends={"up": endpoint})) as runtime:
        await say(runtime, LATE)
        for turn in range(ROUNDS * len(kinds)):
            at = (turn + turn // len(kinds)) % len(kinds)
            before = counters(server)
            found[at].answers.append(await say(runtime, kinds[at]))
            drafted, drafts = counters(server)
            found[at].drafted += drafted - before[0]
            found[at].drafts += drafts - before[1]
    return found


def test_late_calls_get_longer_drafts_and_say_the_same(server: VllmServer) -> None:
    none, late, easy = anyio.run(measured, server, (None, LATE, EASY))
    assert late.length > 1.3 * none.length
    assert 0.8 * none.length < easy.length < 1.2 * none.length
    expected = none.answers[0] * ROUNDS
    for one in (none, late, easy):
        said = [answer for answers in one.answers for answer in answers]
        parted = sum(answer != other for answer, other in zip(said, expected, strict=True))
        assert parted <= MOST_TIES * len(said)
