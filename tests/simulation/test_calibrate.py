"""Costs are found again from exact times, and from the answers of an engine whose steps cost what is known."""

from __future__ import annotations

import asyncio

import pytest

from agentspec.errors import ConfigurationError
from agentspec.simulation.calibrate import StepTimes, fit, measure
from agentspec.simulation.costs import EngineCosts
from agentspec.types import Delta, Usage

TRUE = EngineCosts(step=0.03, sequence=0.002, context_token=1e-6, prompt_token=4e-4, max_batched_tokens=256)


class SteppingEngine:
    """Runs steps on a clock of its own: all prompts that came are read, all others decode."""

    def __init__(self, costs: EngineCosts) -> None:
        self.costs, self.now, self.decoding, self.new = costs, 0.0, {}, []
        self.turn = asyncio.Event()
        self.asked = 0

    async def generate(self, request):
        self.asked += 1
        assert not request.speculation
        prompt, mine = len(request.messages[0]["content"].split()), object()
        self.new.append((mine, prompt))
        for number in range(request.sampling.max_tokens):
            await self.turn.wait()
            while number and mine not in self.decoding:
                await self.turn.wait()
            yield Delta(text="x")
        self.decoding.pop(mine, None)
        yield Delta(finish_reason="length", usage=Usage(prompt, request.sampling.max_tokens))

    async def run(self):
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            costs, reading = self.costs, sum(prompt for _, prompt in self.new)
            if not (self.new or self.decoding):
                continue
            steps = max(1, -(-reading // costs.max_batched_tokens))
            context = sum(self.decoding.values())
            each = costs.step + len(self.decoding) * costs.sequence + context * costs.context_token
            self.now += steps * each + reading * costs.prompt_token
            self.decoding = {one: tokens + steps for one, tokens in self.decoding.items()} | dict(self.new)
            self.new = []
            self.turn.set()
            self.turn = asyncio.Event()


def test_costs_are_found_again_from_exact_times():
    shapes = [(1, 0, 0, 300), (4, 0, 0, 1000), (10, 1, 50, 0), (10, 8, 400, 0), (10, 8, 9000, 0)]
    times = [
        StepTimes(s * (TRUE.step + n * TRUE.sequence + k * TRUE.context_token) + p * TRUE.prompt_token, s, n, k, p)
        for s, n, k, p in shapes
    ]
    found = fit(times, TRUE)
    assert found.model_dump() == pytest.approx(TRUE.model_dump())


def test_no_cost_is_below_zero():
    times = [StepTimes(1.0, 10, 1, 100, 0), StepTimes(0.99, 10, 1, 5000, 0), StepTimes(0.5, 1, 0, 0, 1000)]
    found = fit(times, EngineCosts())
    assert found.context_token == 0.0
    assert found.step > 0


def test_times_that_explain_nothing_are_refused():
    with pytest.raises(ConfigurationError, match="do not fit"):
        fit([StepTimes(1.0, 10, 1, 100, 0), StepTimes(1.0, 10, 2, 100, 0)], EngineCosts())


def test_a_server_whose_answers_have_no_length_is_refused():
    async def generate(request):
        yield Delta(finish_reason="stop")

    times = asyncio.run(measure(generate, "m", TRUE, words=16, rounds=1))
    with pytest.raises(ConfigurationError, match="no answer could be timed"):
        fit(times, TRUE)


def test_an_engine_of_known_costs_is_measured():
    async def main():
        engine = SteppingEngine(TRUE)
        running = asyncio.create_task(engine.run())
        said = []
        times = await measure(
            engine.generate, "m", TRUE, words=1024, answer=16, rounds=1, clock=lambda: engine.now, progress=said.append
        )
        running.cancel()
        return engine, times, said

    engine, times, said = asyncio.run(main())
    assert engine.asked == 1 + 4 + 2 * (1 + 2 + 4 + 8)
    assert len(said) == len(times) == 12
    found = fit(times, TRUE)
    assert found.step == pytest.approx(TRUE.step, rel=0.15)
    assert found.prompt_token == pytest.approx(TRUE.prompt_token, rel=0.15)
    assert found.sequence == pytest.approx(TRUE.sequence, rel=0.3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step": Infinity}', "step: Input should be a finite number"),
        ('{"step": NaN}', "step: "),
        ('{"stepp": 1}', "stepp: "),
        ('{"step": ' + "1" * 5000 + "}", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_costs_that_are_none_are_named(tmp_path, text, says):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigurationError, match=f"costs.json: {says}"):
        EngineCosts.read(tmp_path / "costs.json")
