from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph

from agentspec.langgraph import label
from agentspec.step import report, step
from agentspec.step.decorator import WORKFLOW_KEY


class State(TypedDict, total=False):
    seen: str | None


def graph_of(node: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_edge("node", END)
    return builder.compile(name="named")


def look(state: State, config: RunnableConfig) -> State:
    return {"seen": config.get("metadata", {}).get(WORKFLOW_KEY)}


def test_nodes_learn_the_graphs_name() -> None:
    graph = graph_of(look)
    assert label(graph).invoke({})["seen"] == "named"
    assert label(graph, "mine").invoke({})["seen"] == "mine"
    assert graph.invoke({})["seen"] is None


def test_a_graph_inside_a_graph_is_part_of_the_outer_workflow() -> None:
    inner = label(graph_of(look), "inner")
    assert label(graph_of(inner), "outer").invoke({})["seen"] == "outer"
    assert graph_of(inner).invoke({})["seen"] == "inner"


def test_a_decorated_node_still_gets_config_and_runtime() -> None:
    @step("looking")
    def decorated(state: State, config: RunnableConfig, runtime: Any) -> State:
        assert runtime is not None
        return look(state, config)

    report().reset()
    decorated.__annotations__["runtime"] = "Runtime"
    assert label(graph_of(decorated)).invoke({})["seen"] == "named"
    assert [(row.step, row.runs) for row in report()] == [("looking", 1)]
    report().reset()
