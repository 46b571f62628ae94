"""The version of the installed distribution, `agentspec-inference`: on the package index `agentspec` is another's."""

from importlib.metadata import version

__version__ = version("agentspec-inference")
