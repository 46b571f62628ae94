"""Tools that run before the model asks for them, and whose results are used only for the identical call."""

from agentspec.tools.audit import AuditEvent
from agentspec.tools.keys import AgentCaller
from agentspec.tools.launching import LaunchLimits
from agentspec.tools.policy import ToolPolicy, ToolSpec
from agentspec.tools.prediction.history import ToolCall
from agentspec.tools.python_tools import AgentTools, PythonTool, agent_tools, tool
from agentspec.tools.session import ToolSession
from agentspec.tools.speculator import ToolSpeculator

__all__ = [
    "AgentCaller",
    "AgentTools",
    "AuditEvent",
    "LaunchLimits",
    "PythonTool",
    "ToolCall",
    "ToolPolicy",
    "ToolSession",
    "ToolSpec",
    "ToolSpeculator",
    "agent_tools",
    "tool",
]
