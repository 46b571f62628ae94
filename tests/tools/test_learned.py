"""The predictor learns which call follows which, and where arguments come from, of one tenant's agent alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.tools import AgentCaller, ToolCall, ToolPolicy, ToolSession, ToolSpec, ToolSpeculator
from agentspec.tools.history import ToolHistory, canonical
from agentspec.tools.model import CallModel

pytestmark = pytest.mark.usefixtures("likely_starts_pay")
TOOLS = [ToolSpec("user"), ToolSpec("order"), ToolSpec("buy")]
POLICY = ToolPolicy(["user", "order"])


def run(call: ToolCall) -> str:
    return json.dumps({"orders": [f"#W{call.arguments['id'][-3:]}"]} if call.name == "user" else {"total": 5})


def converse(session: ToolSession, number: int, *, says: str = "I am ann_{}", store: bool = True) -> list[str]:
    """The names of the tools that were started early, where the model reads the user and its order."""
    session.offers(TOOLS)
    session.says(says.format(number))
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


def test_arguments_come_from_the_user_and_from_results() -> None:
    speculator = ToolSpeculator(POLICY)
    teach(speculator)
    started = converse(speculator.session(AgentCaller(session="new")), 777)
    assert started == ['["user",{"id":"ann_777"}]', '["order",{"order":"#W777"}]']


def test_a_value_of_one_session_is_not_tried_in_another() -> None:
    speculator = ToolSpeculator(POLICY)
    names = ["one"] * 9 + ["two"] * 9
    for at, name in enumerate(names):
        started = converse(speculator.session(AgentCaller(session=f"new {at}")), 333, says="hello", store=False)
        assert not any("ann_100" in call for call in started) or name == "two"
        converse(speculator.session(AgentCaller(session=name)), 100, says="hello")  # nothing shows where the id is from
    assert any("ann_100" in call for call in started)  # it is no one session's own any more


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user", "order", "x"]),
            st.dictionaries(st.text(max_size=4), json_values, max_size=3),
            st.text() | st.sampled_from(['{"a": NaN}', "[1e999]", '{"a": [-Infinity, 1]}', "9" * 4000]),
        ),
        max_size=5,
    )
)
def test_any_conversation_can_be_learned(turns: list[tuple[str, dict[str, Any], str]]) -> None:
    model, history, tools = CallModel(), ToolHistory(), {"user", "order"}
    for tool, arguments, text in turns:
        history.says(text)
        forecast = model.predict(history, tools)
        assert all(0.0 <= one.probability <= 1.0 and one.call.name in tools for one in forecast.predictions)
        call = ToolCall(tool, arguments)
        model.learn(history, [call], forecast, tools, "s")
        history.makes(call)
        history.returns(tool, text)
        history.returns(tool, canonical(arguments))
