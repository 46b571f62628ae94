"""Sessions that are played to servers are those that were simulated, and ratios say how far apart both are."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from agentspec.benchmarks.fleet.bench import FleetPlan, FleetReport, run_fleet
from agentspec.benchmarks.fleet.replay import LiveSessions, ReplayFailedError
from agentspec.benchmarks.fleet.servers import pinned_servers
from agentspec.benchmarks.fleet.sessions import DrawnSession, rate_for, simulated, small_sessions
from agentspec.errors import ConfigurationError
from agentspec.simulation.costs import EngineCosts
from agentspec.simulation.scenario import Scenario
from agentspec.simulation.workload import CallShape, SessionShape
from agentspec.types import Delta

COSTS = EngineCosts(step=0.03, prompt_token=0.003, max_running=16, kv_tokens=60_000, block_tokens=1)


class Servers:
    """Two that write at once, and remember what they were asked."""

    def __init__(self, short=0):
        self.short, self.asked = short, []

    def named(self, name):
        async def generate(request):
            self.asked.append((name, request))
            yield Delta(token_ids=tuple(range(request.sampling.max_tokens - self.short)))

        return generate

    @property
    def generators(self):
        return {name: self.named(name) for name in ("engine-0", "engine-1")}


def _played(sessions, servers):
    replay = LiveSessions(servers.generators, "m", "workflow", 3)
    return asyncio.run(replay.seconds(sessions))


def _calls(*calls):
    return DrawnSession(
        0, 0.0, SessionShape("small", (), tuple(CallShape(*call) for call in calls)), [0.0] * len(calls)
    )


def test_prompts_are_as_long_as_simulated_and_repeat_what_was_written():
    session = _calls((50, 0, 5), (80, 55, 7), (100, 87, 3))
    session.pauses = [0.0, 0.0]
    servers = Servers()
    _played([session], servers)
    prompts = [list(request.token_ids) for _, request in servers.asked]
    assert [len(prompt) for prompt in prompts] == [50, 80, 100]
    assert prompts[1][:55] == [*prompts[0], *range(5)] and prompts[2][:87] == [*prompts[1], *range(7)]
    assert [request.sampling.max_tokens for _, request in servers.asked] == [5, 7, 3]
    assert all(request.sampling.ignore_eos and not request.speculation for _, request in servers.asked)
    assert len({name for name, _ in servers.asked}) == 1  # the session stays where its context is


def test_what_is_played_arrives_as_simulated():
    scenario = Scenario(engines=2, sessions=30, rate=1.0, costs=COSTS, block_tokens=1 << 20)
    sessions = simulated(scenario, small_sessions(1))
    assert [session.number for session in sessions] == list(range(30))
    assert all(session.simulated >= sum(session.pauses) for session in sessions)
    assert all(one.arrives < other.arrives for one, other in pairwise(sessions))
    for session in sessions:
        session.arrives, session.pauses = 0.0, [0.0] * len(session.pauses)
    servers = Servers()
    assert len(_played(sessions, servers)) == 30
    assert len(servers.asked) == sum(len(session.shape.calls) for session in sessions)


def test_a_server_that_stops_early_is_no_comparison():
    with pytest.raises(ReplayFailedError, match="ignore_eos"):
        _played([_calls((50, 0, 5))], Servers(short=1))


def test_load_is_a_share_of_what_servers_sustain_in_batches():
    shapes = [SessionShape("small", (), (CallShape(100, 0, 11),))]
    scenario = Scenario(engines=2, sessions=2, rate=1.0, costs=COSTS, block_tokens=1 << 20, policy="workflow")
    one_by_one = 2 / COSTS.alone(100, 11)
    assert rate_for(0.5, scenario, shapes) * 2 == pytest.approx(rate_for(1.0, scenario, shapes))
    assert one_by_one < rate_for(1.0, scenario, shapes) < COSTS.max_running * one_by_one


def test_ratios_are_of_percentiles_and_the_median_of_runs_counts():
    report = FleetReport(
        FleetPlan("m"), COSTS, 1.0, real=[[10.0] * 4] * 3, simulated=[[11.0] * 4, [13.0] * 4, [9.0] * 4]
    )
    assert report.ratio(50) == pytest.approx(1.1)
    assert [cell for _, table in [report.show()] for cell in table.columns[5].cells] == ["met", "met"]
    report.simulated = [[12.5] * 4] * 3
    assert [cell for _, table in [report.show()] for cell in table.columns[5].cells] == ["missed", "met"]


def test_one_server_is_no_fleet():
    with pytest.raises(ConfigurationError, match="at least two"):
        run_fleet(FleetPlan("m"), ["http://127.0.0.1:1/v1"], COSTS, progress=print)


@pytest.mark.long
@pytest.mark.model
def test_a_pair_of_real_servers_is_compared(tmp_path, default_model):
    with pinned_servers(2, "smollm2-135m", tmp_path) as urls:
        plan = FleetPlan("smollm2-135m", sessions=3, runs=1, words=16)
        report = run_fleet(plan, urls, COSTS, progress=print)
    assert len(report.real[0]) == len(report.simulated[0]) == 3
    assert min(report.real[0]) > 0
