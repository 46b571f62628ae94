"""Questions answered from a database: pick the tables, write SQL, run it, mend it until it runs, say what came out.

pip install '.[torch,langgraph]'
python examples/text_to_sql/agent.py                                    # the built-in model, three questions
python examples/text_to_sql/agent.py "Which city has most customers?"
python examples/text_to_sql/agent.py --base-url http://127.0.0.1:8700/v1 --model qwen
python examples/text_to_sql/agent.py --record calls.jsonl               # then: agentspec cache replay calls.jsonl

Every query repeats the schema, and each repair most of the query before it: that is what agentspec drafts from. The
built-in model is small and its SQL often wrong; the graph then says that it found no answer.
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import sys
from contextlib import closing
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from shop import SCHEMA, open_shop, run_query

import agentspec
from agentspec import ChatAgentSpec
from agentspec.errors import AgentSpecError
from agentspec.langchain import CallLog
from agentspec.langgraph import label

QUESTIONS = (
    "How many customers are there in each city?",
    "Which product was ordered most often?",
    "How many orders were returned because they were broken?",
)
MOST_REPAIRS = 2
SYSTEM = "You write SQLite queries. Answer with one SELECT statement and nothing else."


class State(TypedDict, total=False):
    question: str
    tables: list[str]
    query: str
    rows: str
    error: str
    repairs: int
    answer: str


def sql_in(text: str) -> str:
    """The statement in an answer, which may stand in a code block or between sentences; empty if there is none."""
    fenced = re.search(r"```(?:\w*\n)?(.*?)```", text, re.DOTALL)
    found = re.search(r"\b(select|with\s[^;]*\bas\s*\()[^;]*", fenced[1] if fenced else text, re.IGNORECASE)
    return found[0].strip() if found else ""


def build(chat: ChatAgentSpec, shop: sqlite3.Connection) -> Any:
    """The graph: link -> write -> run, and from there to repair and back, or to answer."""

    def schema(state: State) -> str:
        return "\n".join(SCHEMA[table] for table in state["tables"])

    def link(state: State) -> State:
        listed = "\n".join(SCHEMA.values())
        prompt = f"Tables:\n{listed}\n\nName the tables needed to answer, and nothing else: {state['question']}"
        named = chat.invoke(prompt).text.lower()
        return {"tables": [table for table in SCHEMA if table in named] or list(SCHEMA), "repairs": 0}

    def write(state: State) -> State:
        asked = f"Tables:\n{schema(state)}\n\nQuestion: {state['question']}"
        return {"query": sql_in(chat.invoke([("system", SYSTEM), ("user", asked)]).text)}

    def run(state: State) -> State:
        try:
            return {"rows": run_query(shop, state["query"]) if state["query"] else "", "error": ""}
        except (sqlite3.Error, sqlite3.Warning) as error:
            return {"rows": "", "error": str(error)}

    def repair(state: State) -> State:
        wrong = state["error"] or "this is no query"
        asked = (
            f"Tables:\n{schema(state)}\n\nQuestion: {state['question']}\n\nMend this query. {wrong}:\n{state['query']}"
        )
        query = sql_in(chat.invoke([("system", SYSTEM), ("user", asked)]).text)
        return {"query": query or state["query"], "repairs": state["repairs"] + 1}

    def answer(state: State) -> State:
        if not state["rows"]:
            return {"answer": "I found no answer."}
        asked = f"Question: {state['question']}\n\nRows found:\n{state['rows']}\n\nAnswer in one sentence."
        return {"answer": chat.invoke(asked).text.strip()}

    def after_run(state: State) -> str:
        return "answer" if state["rows"] or state["repairs"] >= MOST_REPAIRS else "repair"

    builder = StateGraph(State)
    for node in (link, write, run, repair, answer):
        builder.add_node(node.__name__, node)
    for edge in ((START, "link"), ("link", "write"), ("write", "run"), ("repair", "run"), ("answer", END)):
        builder.add_edge(*edge)
    builder.add_conditional_edges("run", after_run, ["repair", "answer"])
    return label(builder.compile(name="text_to_sql"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="each in quotes; without, three of our own")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--base-url", help="any OpenAI-compatible endpoint, its key in $AGENTSPEC_API_KEY; without, the model runs here"
    )
    parser.add_argument("--record", help="a file to append every call to, for agentspec cache replay")
    options = parser.parse_args()
    log = [CallLog(options.record)] if options.record else None
    chat = ChatAgentSpec(model=options.model, base_url=options.base_url, temperature=0.0, max_tokens=96, callbacks=log)
    with closing(open_shop()) as shop:
        graph = build(chat, shop)
        for number, question in enumerate(options.questions):
            found = graph.invoke({"question": question}, {"configurable": {"thread_id": str(number)}})
            print(f"\n{question}\n  {found['query'] or '(no query)'}\n  {found['answer']}")
    print(agentspec.report())


if __name__ == "__main__":
    try:
        main()
    except AgentSpecError as error:
        sys.exit(f"agent.py: {error}")
