"""What a cache stores beside its sequences: answers, what turns taught about tools, and usage."""

from agentspec.cache.side_stores.side_stores import SideStores

__all__ = ["SideStores"]
