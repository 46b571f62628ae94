"""The gateways and the scripted upstreams of `tests/proxy`, for promises about the gateway as a whole."""

from __future__ import annotations

from tests.proxy.conftest import gateway, shared_gateway, shared_upstream, until, upstream

__all__ = ["gateway", "shared_gateway", "shared_upstream", "until", "upstream"]
