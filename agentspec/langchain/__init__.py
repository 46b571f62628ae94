"""A LangChain chat model for the in-process runtime or a remote gateway, and retrievers that speculate."""

from agentspec.langchain.chat_model import ChatAgentSpec
from agentspec.langchain.knowledge import KnowledgeRetriever, RetrieverKnowledge
from agentspec.langchain.speculative_retriever import Correction, SpeculativeRetriever

__all__ = ["ChatAgentSpec", "Correction", "KnowledgeRetriever", "RetrieverKnowledge", "SpeculativeRetriever"]
