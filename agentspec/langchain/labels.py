"""Labels of a LangChain model call, from the surrounding step or else from the LangGraph node that makes the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.runnables import ensure_config

from agentspec.step.decorator import WORKFLOW_KEY, current_labels
from agentspec.types import Labels


def labels_of_call(session: str | None, metadata: Mapping[str, Any] | None) -> Labels:
    """The labels of a model call made now.

    `metadata` is the call's own; it overrides the metadata of the surrounding run, which LangGraph sets for its nodes.
    An active `@step` names step and workflow; without a step, the node and the graph name them. The session is
    `session`, else the step's, else the graph's `thread_id`.
    """
    around = current_labels()
    run = {**_run_metadata(), **(metadata or {})}
    session = session or around.session or _text(run.get("thread_id"))
    if around.step is not None:
        return Labels(session, around.workflow, around.step)
    graph = _text(run.get(WORKFLOW_KEY) or run.get("lc_agent_name") or run.get("graph_id"))
    return Labels(session, around.workflow or graph, _text(run.get("langgraph_node")))


def _run_metadata() -> dict[str, Any]:
    config = ensure_config()
    thread = config.get("configurable", {}).get("thread_id")
    return {"thread_id": thread, **config.get("metadata", {})}


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)
