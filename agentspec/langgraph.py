"""LangGraph support: labels model calls with the graph that makes them."""

from __future__ import annotations

from typing import Any, TypeVar

from agentspec.errors import needs_extra
from agentspec.step.decorator import WORKFLOW_KEY

with needs_extra("langgraph"):
    from langgraph.pregel import Pregel

G = TypeVar("G", bound=Pregel[Any, Any, Any, Any])


def label(graph: G, workflow: str | None = None) -> G:
    """A copy of a compiled graph whose `ChatAgentSpec` calls carry `workflow`, by default the graph's own name.

    LangGraph passes to each node its node name and the thread id, which become step and session, but not the graph's
    name. If labelled graphs are nested, the outermost one names the workflow.
    """
    return graph.with_config(metadata={WORKFLOW_KEY: workflow or graph.get_name()})
