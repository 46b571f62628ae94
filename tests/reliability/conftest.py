"""The gateways and the scripted upstreams of `tests/proxy`, for promises about the gateway as a whole."""

from __future__ import annotations

from tests.proxy.conftest import gateway, log, shared_gateway, shared_upstream, until, upstream

__all__ = ["gateway", "log", "shared_gateway", "shared_upstream", "until", "upstream"]
