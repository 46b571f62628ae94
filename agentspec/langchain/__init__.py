"""A LangChain chat model on the in-process runtime or on a remote gateway."""

from agentspec.langchain.chat_model import ChatAgentSpec

__all__ = ["ChatAgentSpec"]
