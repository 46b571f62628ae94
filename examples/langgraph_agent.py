"""A LangGraph agent on `ChatAgentSpec`. Node names become steps, the thread id the session: no decorator needed.

python examples/langgraph_agent.py
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

import agentspec
from agentspec import ChatAgentSpec
from agentspec.langgraph import label

# With base_url="http://127.0.0.1:8700/v1" the same graph would use a gateway instead of this process.
chat = ChatAgentSpec(model="smollm2-135m", temperature=0.0, max_tokens=24)


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def answer(state: State) -> dict[str, Any]:
    return {"messages": [chat.invoke(state["messages"])]}


def check(state: State) -> dict[str, Any]:
    return {"messages": [chat.invoke([*state["messages"], ("user", "Repeat your answer.")])]}


builder = StateGraph(State)
builder.add_node("answer", answer)
builder.add_node("check", check)
builder.add_edge(START, "answer")
builder.add_edge("answer", "check")
builder.add_edge("check", END)
# `label` adds the graph's own name, which LangGraph does not tell its nodes.
graph = label(builder.compile(name="capitals", checkpointer=InMemorySaver()))

if __name__ == "__main__":
    ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    thread: Any = {"configurable": {"thread_id": "1"}}
    question: Any = {"messages": [("user", "What is the capital of France?")]}
    for message in graph.invoke(question, thread)["messages"]:
        print(f"{message.type}: {message.text}")
    print(agentspec.report())
