"""`agentspec top` prints what gateways do now, once where its output is no terminal."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from agentspec.settings.server import ApiKey
from agentspec.testing import FakeBackend
from tests.proxy.conftest import gateway

__all__ = ["gateway"]
GONE = "http://127.0.0.1:9"


def test_gateways_stand_side_by_side_and_one_that_is_gone_says_so(program: Any, gateway: Any) -> None:
    url = gateway({"m": FakeBackend("ok")}).url
    done = program("top", "--json", f"{url}/v1")
    assert done.exit_code == 0 and json.loads(done.stdout)[url]["running"] == 0
    both = program("top", url, GONE)
    shown = " ".join(both.stdout.split())
    assert both.exit_code == 1 and re.search("running 0 - ", shown) and "could not be" in shown


@pytest.mark.parametrize(("role", "says"), [("tenant", "answers 403"), ("operator", "running"), ("", "answers 401")])
def test_keys_of_operators_see(program: Any, gateway: Any, monkeypatch: Any, role: Any, says: str) -> None:
    monkeypatch.setenv("AGENTSPEC_API_KEY", "its key" if role else "another")
    monkeypatch.setenv("GATEWAYS_KEY", "its key")
    url = gateway({"m": FakeBackend("ok")}, api_keys=(ApiKey(role=role or "operator", key_env="GATEWAYS_KEY"),)).url
    done = program("top", "--json", url)
    assert says in done.stdout and done.exit_code == (says != "running")
