"""An agent that `langgraph dev` serves in `test_dev_server.py`: it learns which tool is called and starts it early."""

from __future__ import annotations

import logging
import os
import time
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from agentspec.cache import SuffixCache
from agentspec.langchain import AgentSpecMiddleware, EarlyTools
from agentspec.tools import ToolPolicy, ToolSpeculator
from agentspec.tools import model as calls

FOLDER = Path(os.environ["DEV_AGENT_FOLDER"])

# Written by a thread of its own: the server refuses calls that block its loop.
lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
audit = logging.getLogger("agentspec.tools")
audit.setLevel(logging.DEBUG)
audit.addHandler(QueueHandler(lines))
QueueListener(lines, logging.FileHandler(FOLDER / "audit")).start()


@tool
def look(order: str) -> str:
    """Read an order."""
    time.sleep(0.05)
    return f"{order} is on its way"


calls.pays = lambda probability, *_: probability > 0.2  # the scripted model answers at once: little would pay
speculator = ToolSpeculator(ToolPolicy(["look"]), cache=SuffixCache.open(FOLDER / "cache"))
model: Any = ChatOpenAI(model="some", base_url=os.environ["DEV_AGENT_URL"], api_key=SecretStr("k"), streaming=True)
graph = create_agent(model, [look], middleware=[AgentSpecMiddleware(early_tools=EarlyTools(speculator))], name="shop")
