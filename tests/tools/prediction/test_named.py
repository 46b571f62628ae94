"""What is predicted once the model has written a tool's name."""

from __future__ import annotations

import json

import pytest

from agentspec.tools.launching import worthwhile
from agentspec.tools.prediction.history import ToolCall, ToolHistory
from agentspec.tools.prediction.model import CallForecast, CallModel, CallPrediction
from agentspec.tools.prediction.observation import LATER, LATER_NAMED, NAMED, TurnObservation, calling

TOOLS = {"order", "invoice", "weather"}


def turn(model: CallModel, number: int, tool: str, *, right: bool = True) -> tuple[CallForecast, list[CallPrediction]]:
    """The user tells an order, which one of the tools reads, or something else of that form; what was predicted."""
    history = ToolHistory()
    history.says(f"what about #W{number}")
    forecast = model.predict(history, TOOLS)
    named = model.predict_named(history, forecast, tool)
    calls = [ToolCall(tool, {"id": f"#W{number if right else number + 1}"})]
    observed = model.observe(history, calls, forecast.with_named(named), TOOLS, [(calling(tool), 0.5)])
    model.learn(TurnObservation.from_json(observed.to_json()), str(number))
    return forecast, named


@pytest.fixture
def learned() -> CallModel:
    """Each of two tools reads every other order."""
    model = CallModel()
    for number in range(100, 140):
        turn(model, number, "order" if number % 2 else "invoice")
    return model


def test_the_name_makes_its_arguments_likely(learned: CallModel) -> None:
    forecast, named = turn(learned, 600, "order")
    before = {one.call.name: one.probability for one in forecast.predictions}
    assert 0.3 < before["order"] < 0.7 and 0.3 < before["invoice"] < 0.7
    assert [one.call for one in named] == [ToolCall("order", {"id": "#W600"})] and named[0].probability > 0.85
    assert learned.seconds[calling("order")] == pytest.approx(0.5)


def test_a_tool_that_was_never_called_has_no_forecast(learned: CallModel) -> None:
    history = ToolHistory()
    history.says("what about #W1")
    assert learned.predict_named(history, learned.predict(history, TOOLS), "weather") == []


def test_it_is_calibrated_apart(learned: CallModel) -> None:
    """Where only the arguments are wrong once a tool is named, what is said before a turn keeps its own record."""
    history = ToolHistory()
    history.says("what about #W700")
    sure = learned.predict(history, TOOLS)
    (named,) = learned.predict_named(history, sure, "order")
    assert named.kind == NAMED and named.later_kind == LATER_NAMED != sure.predictions[0].later_kind == LATER
    missed = learned.observe(history, [], CallForecast((), ()).with_named([named] * 20), TOOLS)
    learned.learn(missed, "x")
    (corrected,) = learned.predict_named(history, sure, "order")
    assert corrected.probability < 0.6 * named.probability
    after = {one.call.identity: one.probability for one in learned.predict(history, TOOLS).predictions}
    for one in sure.predictions:
        assert after[one.call.identity] > 0.8 * one.probability


def test_a_call_that_was_made_is_less_likely_to_be_the_one_that_is_named(learned: CallModel) -> None:
    history = ToolHistory()
    history.says("what about #W800 and #W801")
    forecast = learned.predict(history, TOOLS)
    first, second = learned.predict_named(history, forecast, "order")
    history.makes(first.call)
    again = {one.call.identity: one for one in learned.predict_named(history, forecast, "order")}
    assert again[first.call.identity].probability < first.probability
    assert again[second.call.identity].probability > second.probability


def test_only_what_is_left_of_the_turn_pays(learned: CallModel) -> None:
    _, named = turn(learned, 900, "order")
    sure = [CallPrediction(one.call, 0.9, 0.9, NAMED) for one in named]
    times = {"order": 2.0}
    assert not worthwhile(sure, times, 0.25, "order")  # nobody knows how long the arguments take
    assert not worthwhile(sure, {**times, calling("order"): 0.01}, 0.25, "order")
    assert worthwhile(sure, {**times, calling("order"): 0.1}, 0.25, "order") == sure
    late = [CallPrediction(one.call, 0.1, 0.1, NAMED, later=0.6) for one in named]
    assert worthwhile(late, times, 0.25, "order") == late


def test_turns_that_were_stored_before_can_be_read() -> None:
    model, history = CallModel(), ToolHistory()
    observed = model.observe(history, [], CallForecast((), ()), TOOLS)
    outlook = ["order", "", False, []]
    old = json.loads(observed.to_json()) | {"later": [[outlook, 0.1, True]]}
    assert TurnObservation.from_json(json.dumps(old)).later[0].kind == LATER
