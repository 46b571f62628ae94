"""The OpenAI-compatible gateway: `create_app` for any ASGI server, `serving.serve` to run it."""

from agentspec.errors import needs_extra

with needs_extra("proxy"):
    from agentspec.proxy.app import create_app

__all__ = ["create_app"]
