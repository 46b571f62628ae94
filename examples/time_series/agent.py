"""A forecast by four agents: one repairs the data, one chooses a method, one computes, one reports.

pip install '.[torch,langgraph]'
python examples/time_series/agent.py                                  # the built-in model, three series made up here
python examples/time_series/agent.py sales --base-url http://127.0.0.1:8700/v1 --model qwen
python examples/time_series/agent.py --record calls.jsonl             # then: agentspec cache replay calls.jsonl

The planner's choice is a JSON schema, which the local engine enforces. A method that does worse on held-out months
than repeating the last year is replaced by that, so that a bad choice costs a line in the report and no more.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, TypedDict

from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

import agentspec
from agentspec import ChatAgentSpec
from agentspec.errors import AgentSpecError
from agentspec.langchain import CallLog
from agentspec.langgraph import label

SEASON, AHEAD = 12, 6
Series = list[float | None]


class Plan(BaseModel):
    """How to forecast a series."""

    method: Literal["last", "seasonal", "drift", "average"]
    outliers: Literal["keep", "clip"]


class State(TypedDict, total=False):
    name: str
    raw: Series
    clean: list[float]
    notes: str
    plan: Plan
    used: str
    error: float
    forecast: list[float]
    report: str


def made_up(name: str, trend: float, season: float, noise: float) -> Series:
    """Five years of months with a trend, a season, noise, three gaps and one outlier; the same on every run."""
    chance = random.Random(name)
    values: Series = [
        round(100 + trend * month + season * math.sin(2 * math.pi * month / SEASON) + chance.gauss(0, noise), 1)
        for month in range(5 * SEASON)
    ]
    for month in chance.sample(range(5, 45), 3):
        values[month] = None
    values[48] = 1000.0
    return values


SERIES = {
    "sales": made_up("sales", 1.5, 20.0, 3.0),
    "visits": made_up("visits", -0.4, 40.0, 5.0),
    "repairs": made_up("repairs", 0.0, 2.0, 8.0),
}


def last(values: Sequence[float], ahead: int) -> list[float]:
    return [values[-1]] * ahead


def seasonal(values: Sequence[float], ahead: int) -> list[float]:
    return [values[len(values) - SEASON + step % SEASON] for step in range(ahead)]


def drift(values: Sequence[float], ahead: int) -> list[float]:
    slope = (values[-1] - values[0]) / (len(values) - 1)
    return [values[-1] + slope * (step + 1) for step in range(ahead)]


def average(values: Sequence[float], ahead: int) -> list[float]:
    return [sum(values[-SEASON:]) / SEASON] * ahead


METHODS: dict[str, Callable[[Sequence[float], int], list[float]]] = {
    method.__name__: method for method in (last, seasonal, drift, average)
}


def filled(values: Series) -> list[float]:
    """The series with its gaps bridged by the value before."""
    found: list[float] = []
    for value in values:
        found.append(value if value is not None else found[-1])
    return found


def clipped(values: Sequence[float]) -> list[float]:
    """The series with values far outside the middle half pulled in."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    reach = 1.5 * (high - low)
    return [min(max(value, low - reach), high + reach) for value in values]


@tool
def describe(values: list[float | None]) -> str:
    """What a series is like: length, gaps, range, change over the whole time."""
    known = [value for value in values if value is not None]
    gaps, change = len(values) - len(known), known[-1] - known[0]
    return f"{len(values)} months, {gaps} gaps, from {min(known):.0f} to {max(known):.0f}, change {change:+.0f}"


@tool
def held_out_error(values: list[float], method: str) -> float:
    """The mean error of a method on the last months, forecast from those before."""
    told, held = values[:-AHEAD], values[-AHEAD:]
    return sum(abs(guess - value) for guess, value in zip(METHODS[method](told, AHEAD), held, strict=True)) / AHEAD


def build(chat: ChatAgentSpec) -> Any:
    """The graph: curator -> planner -> forecaster -> reporter."""

    def curator(state: State) -> State:
        facts = describe.invoke({"values": state["raw"]})
        asked = f"Monthly series {state['name']!r}: {facts}. Say in one sentence what a forecaster must beware of."
        return {"notes": f"{facts}. {chat.invoke(asked).text.strip()}", "clean": filled(state["raw"])}

    def planner(state: State) -> State:
        asked = (
            f"Monthly series {state['name']!r}: {state['notes']}\n\nChoose a method (last value, seasonal: as a year"
            " ago, drift: the trend goes on, average) and whether to clip outliers, as JSON."
        )
        found: Any = chat.with_structured_output(Plan, method="json_schema", include_raw=True).invoke(asked)
        return {"plan": found["parsed"] or Plan(method="seasonal", outliers="clip")}

    def forecaster(state: State) -> State:
        values = clipped(state["clean"]) if state["plan"].outliers == "clip" else state["clean"]
        errors = {
            name: float(held_out_error.invoke({"values": values, "method": name}))
            for name in (state["plan"].method, "seasonal")
        }
        used = min(errors, key=lambda name: errors[name])
        return {"used": used, "error": errors[used], "forecast": METHODS[used](values, AHEAD)}

    def reporter(state: State) -> State:
        numbers = ", ".join(f"{value:.0f}" for value in state["forecast"])
        asked = (
            f"Forecast of {state['name']!r} for {AHEAD} months by the method {state['used']!r}: {numbers}."
            f" Mean error on held-out months: {state['error']:.1f}. Report this in two sentences."
        )
        return {"report": chat.invoke(asked).text.strip()}

    builder = StateGraph(State)
    nodes = (curator, planner, forecaster, reporter)
    for node in nodes:
        builder.add_node(node.__name__, node)
    names = [START, *(node.__name__ for node in nodes), END]
    for edge in pairwise(names):
        builder.add_edge(*edge)
    return label(builder.compile(name="time_series"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("series", nargs="*", default=list(SERIES), help=f"of {', '.join(SERIES)}")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--base-url", help="any OpenAI-compatible endpoint, its key in $AGENTSPEC_API_KEY; without, the model runs here"
    )
    parser.add_argument("--record", help="a file to append every call to, for agentspec cache replay")
    options = parser.parse_args()
    if unknown := set(options.series) - set(SERIES):
        parser.error(f"no series {', '.join(unknown)}: there are {', '.join(SERIES)}")
    log = [CallLog(options.record)] if options.record else None
    chat = ChatAgentSpec(model=options.model, base_url=options.base_url, temperature=0.0, max_tokens=80, callbacks=log)
    graph = build(chat)
    for name in options.series:
        found = graph.invoke({"name": name, "raw": SERIES[name]}, {"configurable": {"thread_id": name}})
        numbers = ", ".join(f"{value:.0f}" for value in found["forecast"])
        print(f"\n{name}: {numbers} ({found['used']}, mean error {found['error']:.1f})\n  {found['report']}")
    print(agentspec.report())


if __name__ == "__main__":
    try:
        main()
    except AgentSpecError as error:
        sys.exit(f"agent.py: {error}")
