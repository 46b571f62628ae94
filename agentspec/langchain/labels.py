"""Labels of a LangChain model call, from the surrounding step or else from the LangGraph node that makes the call."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from langchain_core.runnables import RunnableConfig, ensure_config

from agentspec.step.decorator import WORKFLOW_KEY
from agentspec.step.scope import current_labels, require_text
from agentspec.tools.history import canonical
from agentspec.types import Labels

_RESUMING = "__pregel_resuming"  # what LangGraph sets for the first nodes that it runs after an interrupt
_SAVER = "__pregel_checkpointer"  # where LangGraph says which checkpoints graphs inside a node write
_NOT_THE_CALLER = (  # in `configurable`: says nothing of who asks, or the same as `langgraph_auth_user_id`
    *("thread_id", "run_id", "langgraph_request_id"),
    "langgraph_auth_user",
)


def labels_of_call(session: str | None, metadata: Mapping[str, Any] | None) -> Labels:
    """The labels of a model call made now.

    `metadata` is the call's own; it overrides the metadata of the surrounding run, which LangGraph sets for its nodes.
    An active `@step` names step and workflow; without a step, the node and the graph name them. The session is
    `session`, else the step's, else the graph's `thread_id`. Raises `InvalidRequestError` for one that is no text.
    """
    require_text(Labels(session))
    around = current_labels()
    run = {**_run_metadata(), **(metadata or {})}
    session = session or around.session or _text_or_none(run.get("thread_id"))
    if around.step is not None:
        return Labels(session, around.workflow, around.step)
    graph = _text_or_none(run.get(WORKFLOW_KEY) or run.get("lc_agent_name") or run.get("graph_id"))
    return Labels(session, around.workflow or graph, _text_or_none(run.get("langgraph_node")))


def labels_of_agent(workflow: str | None, session: str | None, *, node: str | None = None) -> Labels:
    """The labels of a model call of the agent whose node runs now; `workflow` and `session` come before the graph's.

    An agent that stands in another graph has its own name, else that of its node there. Where the workflow has another
    name than the agent, the agent is the step, else the node is. A surrounding `@step` comes first, as everywhere.
    `node` stands for another node of the agent than the one that runs.
    """
    around, run = current_labels(), _run_metadata()
    session = session or around.session or _text_or_none(run.get("thread_id"))
    node, agent = node or _text_or_none(run.get("langgraph_node")), _agent_name(run)
    named = workflow or around.workflow or _text_or_none(run.get(WORKFLOW_KEY)) or agent
    if around.step is not None:
        return Labels(session, workflow or around.workflow, around.step)
    return Labels(session, named, node if agent in (None, named) else agent)


def _agent_name(run: Mapping[str, Any]) -> str | None:
    """The agent's name, else the name of the node in which its graph runs, else of the deployed graph."""
    around = [node for node in _around(run) if ":" in node]  # a node's second graph has a number too
    standing = around[-1].partition(":")[0] if around else None
    return _text_or_none(run.get("lc_agent_name")) or _text_or_none(standing) or _text_or_none(run.get("graph_id"))


def _run_metadata() -> dict[str, Any]:
    config = ensure_config()
    thread = config.get("configurable", {}).get("thread_id")
    return {"thread_id": thread, **config.get("metadata", {})}


def _text_or_none(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def is_replayed() -> bool:
    """Whether LangGraph runs the present node again: from a checkpoint that a caller named, or after an interrupt.

    What such a node did when it first ran may have happened already: nothing is to be started ahead of it.
    """
    config = ensure_config()
    addressed = config.get("metadata", {}).get("checkpoint_id") is not None
    return addressed or bool(config.get("configurable", {}).get(_RESUMING))


def branch_of_agent() -> str:
    """Distinguishes the agents, and the branches of one, that run in a session at the same time."""
    return "|".join(_around(_run_metadata()))


def asked_by() -> str:
    """The same for runs with the same `configurable`, such as the user on whose behalf tools run; "" without any.

    Raises `ValueError` or `TypeError` for what JSON cannot hold: two secrets may look the same.
    """
    given = {name: value for name, value in _configurable() if name not in _NOT_THE_CALLER}
    return hashlib.sha256(canonical(given).encode("utf-8", "surrogatepass")).hexdigest() if given else ""


def config_of_tool() -> RunnableConfig:
    """What a tool that runs outside of the graph's run may learn of it: what the caller configured.

    It can neither interrupt the run nor write its checkpoints.
    """
    return RunnableConfig(configurable={**dict(_configurable()), _SAVER: None})


def _configurable() -> list[tuple[str, Any]]:
    given = ensure_config().get("configurable", {})
    return [(name, value) for name, value in given.items() if not name.startswith(("__", "checkpoint_"))]


def _around(run: Mapping[str, Any]) -> list[str]:
    """The nodes, each with the id of its task, in which the graph of the present node runs."""
    return str(run.get("langgraph_checkpoint_ns") or "").split("|")[:-1]
