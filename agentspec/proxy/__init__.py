"""The OpenAI-compatible gateway: `create_app` for any ASGI server, `agentspec.proxy.server.serve` for uvicorn."""

from agentspec.proxy.app import create_app

__all__ = ["create_app"]
