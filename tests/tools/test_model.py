"""The predictor learns which call follows which, and where its arguments come from."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentspec.tools.history import ToolCall, ToolHistory, canonical
from agentspec.tools.model import CallModel, OpenForecasts

TOOLS = {"user", "orders", "order"}


def session(model: CallModel, number: int, words: str = "I am {id}, hello") -> list[tuple[str, float]]:
    """The user tells an id, `user` lists orders, `order` reads each. Returns (best prediction, p) by turn."""
    history, best = ToolHistory(), []
    name, orders = f"ann_{1000 + number}", [f"#W{number}{n}77" for n in range(2)]
    steps: list[tuple[ToolCall | None, Any]] = [
        (ToolCall("user", {"id": name}), {"id": name, "orders": orders}),
        *((ToolCall("order", {"order": order, "full": True}), {"total": 5}) for order in orders),
        (None, None),
    ]
    history.says(words.format(id=name))
    for call, result in steps:
        forecast = model.predict(history, TOOLS)
        top = forecast.predictions[:1]
        best.append((top[0].call.identity, top[0].probability) if top else ("", 0.0))
        calls = [call] if call else []
        model.learn(history, calls, forecast, TOOLS, str(number))
        if call:
            history.makes(call)
            history.returns(call.name, json.dumps(result))
    return best


def test_arguments_come_from_the_user_from_results_and_from_constants() -> None:
    model = CallModel()
    for number in range(6):
        session(model, number)
    found = session(model, 7)
    assert [call for call, _ in found[:3]] == [
        canonical(["user", {"id": "ann_1007"}]),
        canonical(["order", {"order": "#W7077", "full": True}]),
        canonical(["order", {"order": "#W7177", "full": True}]),
    ]
    assert all(probability > 0.5 for _, probability in found[:3]) and found[3][1] < 0.3


def test_a_constant_of_one_session_is_not_tried_in_another() -> None:
    model = CallModel()
    for _ in range(3):
        session(model, 1, words="hello")  # the id is found nowhere
    assert not any("ann_1001" in call for call, _ in session(model, 2, words="hello")[:1])
    history = ToolHistory()
    history.says("hello")
    model.learn(history, [ToolCall("user", {"id": "ann_1001"})], model.predict(history, TOOLS), TOOLS, "another")
    assert "ann_1001" in session(model, 4, words="hello")[0][0]


def test_tools_outside_the_given_are_not_predicted() -> None:
    model, history = CallModel(), ToolHistory()
    history.says("pay 55 to me")
    forecast = model.predict(history, TOOLS)
    model.learn(history, [ToolCall("pay", {"amount": 55, "to": "me"})], forecast, TOOLS, "s")
    assert model.predict(history, TOOLS).predictions == ()


def listing(model: CallModel, number: int, *, reads: bool, size: int = 2) -> float:
    """The user's orders are listed, and read in turn, or the first one alone. Returns how likely the last one was."""
    history, open_ = ToolHistory(), OpenForecasts(30.0)
    orders = [f"#W{number}{n}77" for n in range(size)]
    history.says("hello")
    history.makes(ToolCall("user", {}))
    history.returns("user", json.dumps({"orders": orders}))
    chances = []
    for at, order in enumerate(orders if reads else [orders[0], None]):
        calls = [ToolCall("order", {"order": order})] if order else []
        forecast, now = model.predict(history, TOOLS), 20.0 * at / size
        last = canonical(["order", {"order": orders[-1]}])
        chances.append(max((one.later for one in forecast.predictions if one.call.identity == last), default=0.0))
        made = {call.identity for call in calls}
        later = open_.settle(forecast, made, began=now, now=now + 1, voids=False)
        model.learn(history, calls, forecast, TOOLS, str(number), later=later)
        for call in calls:
            history.makes(call)
            history.returns(call.name, json.dumps({"total": 5}))
    return chances[0]


def test_calls_of_later_turns_are_predicted_also_of_a_list_that_is_read_item_by_item() -> None:
    read, never, long = CallModel(), CallModel(), CallModel()
    for number in range(10, 30):
        often, seldom = listing(read, number, reads=True), listing(never, number, reads=False)
        whole = listing(long, number, reads=True, size=6)
    assert often > 0.6 and whole > 0.6 and seldom < 0.2


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
    model, history = CallModel(), ToolHistory()
    for tool, arguments, text in turns:
        history.says(text)
        forecast = model.predict(history, TOOLS)
        assert all(0.0 <= one.probability <= 1.0 for one in forecast.predictions)
        call = ToolCall(tool, arguments)
        model.learn(history, [call], forecast, TOOLS, "s")
        history.makes(call)
        history.returns(tool, text)
        history.returns(tool, canonical(arguments))
