"""The gateways and the scripted upstreams of `tests/proxy`, for promises about the gateway as a whole."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("proxy_fixtures", Path(__file__).parents[1] / "proxy" / "conftest.py")
assert _SPEC and _SPEC.loader
_fixtures = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _fixtures
_SPEC.loader.exec_module(_fixtures)

gateway = _fixtures.gateway
shared_gateway = _fixtures.shared_gateway
upstream = _fixtures.upstream
shared_upstream = _fixtures.shared_upstream
until = _fixtures.until
hanging_up = _fixtures.hanging_up
