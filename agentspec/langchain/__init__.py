"""LangChain and LangGraph: a chat model, a middleware for agents, and a retriever."""

from typing import TYPE_CHECKING, Any

from agentspec.errors import needs_extra

with needs_extra("langgraph"):
    from agentspec.langchain.call_log import CallLog
    from agentspec.langchain.chat_model import ChatAgentSpec
    from agentspec.langchain.retrievers import KnowledgeRetriever

if TYPE_CHECKING:
    from agentspec.langchain.early_tools import EarlyTools
    from agentspec.langchain.middleware import AgentSpecMiddleware

__all__ = [
    "AgentSpecMiddleware",
    "CallLog",
    "ChatAgentSpec",
    "EarlyTools",
    "KnowledgeRetriever",
]


def __getattr__(name: str) -> Any:
    if name not in ("AgentSpecMiddleware", "EarlyTools"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs_extra("langgraph"):
        from agentspec.langchain import early_tools, middleware  # need `langchain`, which the chat model does without

    return middleware.AgentSpecMiddleware if name == "AgentSpecMiddleware" else early_tools.EarlyTools
