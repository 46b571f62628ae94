"""Labels of a LangChain model call, from the surrounding step or else from the LangGraph node that makes the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.runnables import ensure_config

from agentspec.step.decorator import WORKFLOW_KEY
from agentspec.step.scope import current_labels
from agentspec.types import Labels

_RESUMING = "__pregel_resuming"  # what LangGraph sets for the first nodes that it runs after an interrupt


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


def labels_of_agent(workflow: str | None, session: str | None, *, node: str | None = None) -> Labels:
    """The labels of a model call of the agent whose node runs now; `workflow` and `session` come before the graph's.

    An agent that stands in another graph has its own name, else that of its node there. Where the workflow has another
    name than the agent, the agent is the step, else the node is. A surrounding `@step` comes first, as everywhere.
    `node` stands for another node of the agent than the one that runs.
    """
    around, run = current_labels(), _run_metadata()
    session = session or around.session or _text(run.get("thread_id"))
    node, agent = node or _text(run.get("langgraph_node")), _agent_name(run)
    named = workflow or around.workflow or _text(run.get(WORKFLOW_KEY)) or agent
    if around.step is not None:
        return Labels(session, workflow or around.workflow, around.step)
    return Labels(session, named, node if agent in (None, named) else agent)


def _agent_name(run: Mapping[str, Any]) -> str | None:
    """The agent's name, else the name of the node in which its graph runs, else of the deployed graph."""
    around = str(run.get("langgraph_checkpoint_ns") or "").split("|")[:-1]
    standing = around[-1].partition(":")[0] if around else None
    return _text(run.get("lc_agent_name")) or _text(standing) or _text(run.get("graph_id"))


def _run_metadata() -> dict[str, Any]:
    config = ensure_config()
    thread = config.get("configurable", {}).get("thread_id")
    return {"thread_id": thread, **config.get("metadata", {})}


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def is_replayed() -> bool:
    """Whether LangGraph runs the present node again: from a checkpoint that a caller named, or after an interrupt.

    What such a node did when it first ran may have happened already: nothing is to be started ahead of it.
    """
    config = ensure_config()
    addressed = config.get("metadata", {}).get("checkpoint_id") is not None
    return addressed or bool(config.get("configurable", {}).get(_RESUMING))
