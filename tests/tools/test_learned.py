"""What was learned outlives a restart, belongs to one tenant's agent, and is gone when it is forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.stored import new_turn
from agentspec.tools import AgentCaller, ToolCall, ToolPolicy, ToolSession, ToolSpec, ToolSpeculator

pytestmark = pytest.mark.usefixtures("likely_starts_pay")
BROKEN: dict[str, Any] = {
    "after": [[]], "first": {}, "promise": [["user", "x"]], "forms": [], "rules": [], "sources": [], "scores": [],
    "seconds": [],
}  # fmt: skip
TOOLS = [ToolSpec("user"), ToolSpec("order"), ToolSpec("buy")]
POLICY = ToolPolicy(["user", "order"])


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


def test_a_restart_keeps_what_was_learned_until_it_is_forgotten(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        teach(ToolSpeculator(POLICY, cache=cache))
        with SuffixCache.open(tmp_path) as other:  # of another process
            cache.flush()
            assert tried(ToolSpeculator(POLICY, cache=other))
    with SuffixCache.open(tmp_path) as cache:
        assert tried(ToolSpeculator(POLICY, cache=cache))
        cache.forget(tenant="default")
        assert not tried(ToolSpeculator(POLICY, cache=cache))


def test_tenants_and_agents_share_nothing_and_a_session_without_store_teaches_nothing() -> None:
    speculator = ToolSpeculator(POLICY)
    teach(speculator, tenant="a", agent="x")
    assert not tried(speculator, tenant="b", agent="x") and not tried(speculator, tenant="a", agent="y")
    assert tried(speculator, tenant="a", agent="x")
    teach(speculator, tenant="c", store=False)
    assert not tried(speculator, tenant="c")


def test_a_turn_that_cannot_be_read_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with SuffixCache.open() as cache:
        teach(ToolSpeculator(POLICY, cache=cache))
        for body in (
            "no JSON",
            "[]",
            '{"version": 1}',
            '{"version": 3, "after": 3}',
            json.dumps({"version": 3, **BROKEN}),
        ):
            cache.tool_turns.put(new_turn("default", "agent", "s", body))
        assert tried(ToolSpeculator(POLICY, cache=cache))
    assert len([one for one in caplog.records if "is left out" in one.message]) == 5


def test_an_agent_of_which_no_tool_may_run_early_teaches_nothing() -> None:
    with SuffixCache.open() as cache:
        teach(ToolSpeculator(cache=cache))
        assert cache.tool_turns.ids("default", "agent") == []
