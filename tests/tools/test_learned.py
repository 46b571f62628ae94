"""What was learned belongs to one tenant's agent, and is gone when it is forgotten."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.tools import AgentCaller, ToolCall, ToolPolicy, ToolSession, ToolSpec, ToolSpeculator

pytestmark = pytest.mark.usefixtures("likely_starts_pay")
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


def test_tenants_and_agents_share_nothing_and_forgotten_and_unstored_sessions_teach_nothing() -> None:
    speculator = ToolSpeculator(POLICY)
    teach(speculator, tenant="a", agent="x")
    assert not tried(speculator, tenant="b", agent="x") and not tried(speculator, tenant="a", agent="y")
    assert tried(speculator, tenant="a", agent="x")
    teach(speculator, tenant="c", store=False)
    assert not tried(speculator, tenant="c")
    speculator.forget("a")
    assert not tried(speculator, tenant="a", agent="x")
