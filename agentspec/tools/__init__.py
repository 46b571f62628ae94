"""Tools that run before the model asks for them, and whose results are used only for the identical call."""

from agentspec.tools.history import ToolCall
from agentspec.tools.policy import AgentCaller, ToolPolicy, ToolSpec
from agentspec.tools.session import ToolSession
from agentspec.tools.speculative_call import ToolEvent
from agentspec.tools.speculator import ToolSpeculator

__all__ = [
    "AgentCaller",
    "ToolCall",
    "ToolEvent",
    "ToolPolicy",
    "ToolSession",
    "ToolSpec",
    "ToolSpeculator",
]
