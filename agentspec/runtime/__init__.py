"""The wiring: the cache and the backends that the settings name, and the way of each request to its backend."""

from agentspec.runtime.runtime import Route, Runtime

__all__ = ["Route", "Runtime"]
