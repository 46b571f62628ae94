"""What was learned outlives a restart, belongs to one tenant's agent, and is gone when it is forgotten."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.side_stores import ToolTurnStore
from agentspec.cache.storage.opening import prepare
from agentspec.cache.storage.sqlite import MemoryDatabase
from agentspec.cache.stored import StoreLimits, new_turn
from agentspec.tools import AgentCaller, ToolCall, ToolPolicy, ToolSession, ToolSpec, ToolSpeculator
from agentspec.tools.history import ToolHistory
from agentspec.tools.speculator import LearnedCalls

BROKEN: dict[str, Any] = {
    "after": [[]], "first": {}, "promise": [["user", "x"]], "forms": [], "rules": [], "sources": [], "scores": [],
    "seconds": [],
}  # fmt: skip
TOOLS = [ToolSpec("user"), ToolSpec("order"), ToolSpec("buy")]
POLICY = ToolPolicy(["user", "order"])


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.tools.model.pays", lambda probability, *_: probability > 0.3)


def run(call: ToolCall) -> str:
    return json.dumps({"orders": [f"#W{call.arguments['id'][-3:]}"]} if call.name == "user" else {"total": 5})


def converse(session: ToolSession, number: int, *, store: bool = True) -> list[str]:
    """The names of the tools that were started early, where the model reads the user and its order."""
    session.offers(TOOLS)
    session.says(f"I am ann_{number}")
    started = []
    for call in (ToolCall("user", {"id": f"ann_{number}"}), ToolCall("order", {"order": f"#W{number}"}), None):
        started += [one.identity for one in session.begin_turn(run)]
        session.end_turn([call] if call else [], store=store)
        if call:
            session.returns(call.name, session.run(call, run))
    return started


def teach(speculator: ToolSpeculator, *, store: bool = True, **caller: Any) -> None:
    for number in range(100, 112):
        converse(speculator.session(AgentCaller(session=f"{caller} {number}", **caller)), number, store=store)


def tried(speculator: ToolSpeculator, **caller: Any) -> bool:
    return '["user",{"id":"ann_777"}]' in converse(speculator.session(AgentCaller(session="new", **caller)), 777)


def test_a_restart_keeps_what_was_learned(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        teach(ToolSpeculator(POLICY, cache=cache))
    with SuffixCache.open(tmp_path) as cache:
        assert tried(ToolSpeculator(POLICY, cache=cache))
        cache.forget(tenant="default")
        assert not tried(ToolSpeculator(POLICY, cache=cache))


def test_tenants_and_agents_share_nothing(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        speculator = ToolSpeculator(POLICY, cache=cache)
        teach(speculator, tenant="a", agent="x")
        assert not tried(speculator, tenant="b", agent="x")
        assert not tried(speculator, tenant="a", agent="y")
        assert tried(speculator, tenant="a", agent="x")


def test_results_are_not_shared_between_tenants_identities_sessions_and_schemas() -> None:
    from agentspec.tools.policy import call_key

    def key(schema: dict[str, Any] | None = None, **caller: Any) -> str:
        return call_key(AgentCaller(**caller), ToolSpec("user", schema or {}), {"id": "ann_1"})

    keys = {key(), key(tenant="b"), key(identity="key 2"), key(session="s"), key({"type": "object"})}
    assert len(keys) == 5 and key() == key(agent="any")


def test_a_session_without_store_teaches_nothing() -> None:
    speculator = ToolSpeculator(POLICY)
    teach(speculator, store=False)
    assert not tried(speculator)


def test_a_turn_that_cannot_be_learned_is_left_out() -> None:
    with SuffixCache.open() as cache:
        teach(ToolSpeculator(POLICY, cache=cache))
        for body in ("no JSON", json.dumps({"version": 3, **BROKEN})):
            cache.tool_turns.put(new_turn("default", "agent", "s", body))
        assert tried(ToolSpeculator(POLICY, cache=cache))


def test_turns_are_learned_while_the_database_is_read() -> None:
    """`begin_turn` reads in another thread: whoever learns meanwhile does not wait, and nothing counts twice."""

    class Slow(ToolTurnStore):
        def ids(self, tenant: str, agent: str) -> list[str]:
            reading.set()
            assert release.wait(60)
            return super().ids(tenant, agent)

    reading, release = threading.Event(), threading.Event()
    prepare(database := MemoryDatabase())
    learned = LearnedCalls(Slow(database, StoreLimits()))
    caller, history, call = AgentCaller(), ToolHistory(), ToolCall("user", {"id": "ann_1"})
    reader = threading.Thread(target=learned.refresh, args=(caller,))
    reader.start()
    assert reading.wait(60)
    learned.took(caller, "user", 1.0)
    forecast, _ = learned.forecast(caller, history, ["user"])
    learned.add(caller, history, [call], forecast, ["user"])
    assert reader.is_alive()
    before = learned.forecast(caller, history, ["user"])
    release.set()
    reader.join()
    assert learned.forecast(caller, history, ["user"]) == before


def test_another_process_takes_part_in_what_is_learned(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache, SuffixCache.open(tmp_path) as other:
        teach(ToolSpeculator(POLICY, cache=cache))
        cache.flush()
        assert tried(ToolSpeculator(POLICY, cache=other))


def test_an_agent_of_which_no_tool_may_run_early_teaches_nothing() -> None:
    with SuffixCache.open() as cache:
        teach(ToolSpeculator(cache=cache))
        assert cache.tool_turns.ids("default", "agent") == []
