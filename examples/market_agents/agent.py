"""Four analysts look at a price from four sides, at the same time, and a fifth agent decides.

pip install '.[torch,langgraph]'
python examples/market_agents/agent.py                                 # the built-in model, all symbols of prices.csv
python examples/market_agents/agent.py BETA --base-url http://127.0.0.1:8700/v1 --model qwen
python examples/market_agents/agent.py --record calls.jsonl            # then: agentspec cache replay calls.jsonl

prices.csv holds 120 trading days of three companies that do not exist, recorded from a random walk. The analysts'
figures are computed by tools; the model puts them into words. What it decides is no advice: the example shows how
agents that say nearly the same thing about each symbol are drafted from each other.
"""

from __future__ import annotations

import argparse
import csv
import math
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from pydantic import BaseModel, Field

import agentspec
from agentspec import ChatAgentSpec
from agentspec.errors import AgentSpecError
from agentspec.langchain import CallLog
from agentspec.langgraph import label

PRICES = Path(__file__).with_name("prices.csv")


class Decision(BaseModel):
    """What to do with a symbol."""

    action: Literal["buy", "hold", "sell"]
    reason: str = Field(max_length=200)


class State(TypedDict, total=False):
    symbol: str
    opinions: Annotated[list[str], operator.add]
    decision: Decision


class Task(TypedDict):
    analyst: str
    symbol: str


def history(symbol: str) -> tuple[list[float], list[float]]:
    """Closing prices and volumes of a symbol, oldest first."""
    with PRICES.open() as file:
        rows = [row for row in csv.DictReader(file) if row["symbol"] == symbol]
    return [float(row["close"]) for row in rows], [float(row["volume"]) for row in rows]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@tool
def trend(symbol: str) -> str:
    """The averages of the last 10 and 50 closing prices."""
    closes, _ = history(symbol)
    short, long = mean(closes[-10:]), mean(closes[-50:])
    return f"average of 10 days {short:.2f}, of 50 days {long:.2f}: {'up' if short > long else 'down'}"


@tool
def momentum(symbol: str) -> str:
    """The change of the price in 5 and in 20 days."""
    closes, _ = history(symbol)
    changes = [100 * (closes[-1] / closes[-1 - days] - 1) for days in (5, 20)]
    return f"change in 5 days {changes[0]:+.1f} %, in 20 days {changes[1]:+.1f} %"


@tool
def risk(symbol: str) -> str:
    """The daily volatility of the last 20 days, and the deepest fall from a high."""
    closes, _ = history(symbol)
    steps = [math.log(after / before) for before, after in zip(closes[-21:], closes[-20:], strict=False)]
    spread = math.sqrt(mean([(step - mean(steps)) ** 2 for step in steps]))
    fall = max(1 - price / max(closes[: day + 1]) for day, price in enumerate(closes))
    return f"daily volatility {100 * spread:.1f} %, deepest fall {100 * fall:.0f} %"


@tool
def volume(symbol: str) -> str:
    """The last 5 days' volume in proportion to the average."""
    _, volumes = history(symbol)
    return f"volume of 5 days is {mean(volumes[-5:]) / mean(volumes):.2f} times the average"


ANALYSTS: dict[str, Any] = {one.name: one for one in (trend, momentum, risk, volume)}


def build(chat: ChatAgentSpec) -> Any:
    """The graph: four analysts side by side, then the decision. Each analyst is a step of its own in the report."""

    def analyst(name: str) -> Callable[[Task], State]:
        def look(task: Task) -> State:
            figures = ANALYSTS[name].invoke({"symbol": task["symbol"]})
            asked = (
                f"You analyse the {name} of a share. {task['symbol']}: {figures}. Say in one sentence what this means."
            )
            return {"opinions": [f"{name} ({figures}): {chat.invoke(asked).text.strip()}"]}

        return look

    def spread(state: State) -> list[Send]:
        return [Send(name, {"analyst": name, "symbol": state["symbol"]}) for name in ANALYSTS]

    def decide(state: State) -> State:
        opinions = "\n".join(sorted(state["opinions"]))
        asked = f"Four analysts about {state['symbol']}:\n{opinions}\n\n"
        asked += "Decide: buy, hold or sell, with a short reason, as JSON."
        found: Any = chat.with_structured_output(Decision, method="json_schema", include_raw=True).invoke(asked)
        return {"decision": found["parsed"] or Decision(action="hold", reason="the answer was no decision")}

    builder = StateGraph(State)
    builder.add_conditional_edges(START, spread, list(ANALYSTS))
    for name in ANALYSTS:
        builder.add_node(name, analyst(name))  # type: ignore[arg-type]  # its input is what Send gives it
    builder.add_node("decide", decide)
    builder.add_edge(list(ANALYSTS), "decide")
    builder.add_edge("decide", END)
    return label(builder.compile(name="market_agents"))


def main() -> None:
    symbols = sorted({row["symbol"] for row in csv.DictReader(PRICES.read_text().splitlines())})
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("symbols", nargs="*", default=symbols, help=f"of {', '.join(symbols)}")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--base-url", help="any OpenAI-compatible endpoint, its key in $AGENTSPEC_API_KEY; without, the model runs here"
    )
    parser.add_argument("--record", help="a file to append every call to, for agentspec cache replay")
    options = parser.parse_args()
    if unknown := set(options.symbols) - set(symbols):
        parser.error(f"no prices of {', '.join(unknown)}: there are {', '.join(symbols)}")
    log = [CallLog(options.record)] if options.record else None
    chat = ChatAgentSpec(model=options.model, base_url=options.base_url, temperature=0.0, max_tokens=80, callbacks=log)
    graph = build(chat)
    for symbol in options.symbols:
        found = graph.invoke({"symbol": symbol}, {"configurable": {"thread_id": symbol}})
        print(f"\n{symbol}: {found['decision'].action}. {found['decision'].reason}")
        for opinion in sorted(found["opinions"]):
            print(f"  {opinion}")
    print(agentspec.report())


if __name__ == "__main__":
    try:
        main()
    except AgentSpecError as error:
        sys.exit(f"agent.py: {error}")
