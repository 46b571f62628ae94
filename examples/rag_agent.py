"""A LangGraph agent that looks things up before it answers, and again with its answer at hand.

pip install '.[torch,langgraph,retrieval]'
python examples/rag_agent.py                                  # twelve passages of Wikipedia, CC BY-SA 4.0
python examples/rag_agent.py CORPUS.jsonl "a question"        # lines of {"id", "title", "text"}, plain or gzip
python examples/rag_agent.py --base-url http://127.0.0.1:8700/v1 --model qwen
python examples/rag_agent.py --record calls.jsonl             # then: agentspec cache replay calls.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any, TypedDict

from langchain_core.retrievers import BaseRetriever
from langgraph.graph import END, START, StateGraph

import agentspec
from agentspec import ChatAgentSpec
from agentspec.errors import AgentSpecError
from agentspec.langchain import CallLog, KnowledgeRetriever
from agentspec.langgraph import label
from agentspec.reasoning.retrieval.knowledge.folder import in_memory
from agentspec.recordings.corpus import read_corpus

PASSAGES = Path(__file__).with_name("passages.jsonl")
QUESTION = "Who became Tesla's partners after he left Edison's company?"


class State(TypedDict, total=False):
    question: str
    answer: str


def agent(chat: ChatAgentSpec, retriever: BaseRetriever) -> Any:
    """The graph. Any LangChain retriever will do."""

    async def answer(state: State) -> State:
        found = await retriever.ainvoke(f"{state['question']} {state.get('answer', '')}")
        passages = "\n\n".join(document.page_content for document in found)
        return {"answer": (await chat.ainvoke(f"{passages}\n\nAnswer in one sentence: {state['question']}")).text}

    builder = StateGraph(State)
    builder.add_node("draft", answer)
    builder.add_node("check", answer)
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "check")
    builder.add_edge("check", END)
    return label(builder.compile(name="rag"))


async def main(chat: ChatAgentSpec, corpus: Path, question: str) -> None:
    retriever = KnowledgeRetriever(base=in_memory(list(read_corpus(corpus)), "bm25"), k=1)
    async for update in agent(chat, retriever).astream({"question": question}, stream_mode="updates"):
        for node, state in update.items():
            print(f"{node}: {state['answer']}")
    print(agentspec.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "corpus", nargs="?", type=Path, default=PASSAGES, help='a file of lines {"id", "title", "text"}'
    )
    parser.add_argument("question", nargs="*", default=[QUESTION], help="what to look up; needs the corpus before it")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--base-url", help="any OpenAI-compatible endpoint, its key in $AGENTSPEC_API_KEY; without, the model runs here"
    )
    parser.add_argument("--record", help="a file to append every call to, for agentspec cache replay")
    options = parser.parse_args()
    if not options.corpus.is_file():
        parser.error(f"no file {str(options.corpus)!r}: the corpus comes first, then the question")
    try:
        log = [CallLog(options.record)] if options.record else None
        model = ChatAgentSpec(
            model=options.model, base_url=options.base_url, temperature=0.0, max_tokens=32, callbacks=log
        )
        asyncio.run(main(model, options.corpus, " ".join(options.question)))
    except AgentSpecError as error:
        sys.exit(f"rag_agent.py: {error}")
