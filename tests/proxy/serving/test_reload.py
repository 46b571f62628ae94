"""SIGHUP: keys and limits change while requests run; what cannot be used changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError
from agentspec.proxy.serving.reload import RELOADABLE, Reloader, restart_needed, with_servers
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import FakeBackend

BODY = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def status(url: str, key: str) -> int:
    return httpx.get(f"{url}/version", headers={"authorization": f"Bearer {key}"}).status_code


def test_sighup_takes_over_keys_and_limits(tmp_path: Path) -> None:
    key, file, log = tmp_path / "key", tmp_path / "agentspec.toml", tmp_path / "log"
    key.write_text("first-canary")
    text = '[server]\nport = 0\nmax_messages = {}\n[[server.api_keys]]\nkey_file = "key"\n'
    text += '[backends.up]\nkind = "openai"\nbase_url = "http://127.0.0.1:9/v1"\n'
    file.write_text(text.format(5))
    command = [Path(sys.executable).with_name("agentspec"), "serve", "--config", file]
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, cwd=tmp_path) as process:

        def said(what: str, times: int = 1) -> str:
            limit = time.monotonic() + 60
            while (written := log.read_text()).count(what) < times:
                assert time.monotonic() < limit and process.poll() is None, written
                time.sleep(0.02)
            return written

        try:
            [url] = re.findall(r"running on (\S+)", said("running on"))
            said('"ready"')
            assert (status(url, "first-canary"), status(url, "second-canary")) == (200, 401)
            key.write_text("second-canary")
            file.write_text(text.format(1))
            process.send_signal(signal.SIGHUP)
            said("configuration reloaded")
            assert (status(url, "first-canary"), status(url, "second-canary")) == (401, 200)
            two = {**BODY, "messages": BODY["messages"] * 2}  # type: ignore[operator]
            keyed = {"authorization": "Bearer second-canary"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=two, headers=keyed)
            assert answer.status_code == 400 and "1 are allowed" in answer.text
            for times, broken in enumerate(
                ("[server", "[server]\nmax_messages = 0", '[server]\napi_keys = ["canary"]'), 1
            ):
                file.write_text(broken)
                process.send_signal(signal.SIGHUP)
                said("configuration not reloaded", times)
            assert status(url, "second-canary") == 200
            file.write_text(text.format(1).replace("port = 0", "port = 1"))
            process.send_signal(signal.SIGHUP)
            assert '"needs_restart": ["server.port"]' in said("configuration reloaded", 2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "canary" not in log.read_text()
    assert all(json.loads(line) for line in log.read_text().splitlines())


@pytest.fixture
def keyed(gateway: Any, tmp_path: Path) -> Any:
    (tmp_path / "key").write_text("secret")
    return gateway({"fake": FakeBackend("fine")}, api_keys=(ApiKey(key_file=tmp_path / "key"),), max_concurrent=1)


def reloader(running: Any) -> Reloader:
    return Reloader(running.server, running.app, running.runtime.settings, None)


def applied(running: Any, **server: Any) -> None:
    settings = running.runtime.settings.server.model_copy(update=server)
    reloader(running).apply(Settings(server=settings, backends={}))


def test_every_limit_reaches_what_it_limits(keyed: Any) -> None:
    applied(keyed, max_concurrent=7, request_timeout=9.0, header_timeout=3.0, keep_alive_timeout=4.0)
    assert keyed.app.limiter._settings.max_concurrent == 7
    assert {endpoint.settings.request_timeout for endpoint in keyed.app.endpoints} == {9.0}
    assert keyed.server.connections.settings.header_timeout == 3.0 and keyed.server.config.timeout_keep_alive == 4.0
    applied(keyed, allowed_hosts=("only.example",))
    wrong = {"host": "other.example", "authorization": "Bearer secret"}
    assert httpx.get(f"{keyed.url}/v1/models", headers=wrong).status_code == 421


def test_a_missing_key_file_changes_nothing(keyed: Any, tmp_path: Path) -> None:
    (tmp_path / "key").unlink()
    with pytest.raises(ConfigurationError):
        applied(keyed, max_concurrent=7)
    assert keyed.app.limiter._settings.max_concurrent == 1 and status(keyed.url, "secret") == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_the_door_is_not_opened(keyed: Any, host: str) -> None:
    public = keyed.runtime.settings.server.model_copy(update={"host": host})
    there = Reloader(keyed.server, keyed.app, Settings(server=public, backends={}), None)
    with pytest.raises(ConfigurationError, match="restart"):
        there.apply(Settings(server=public.model_copy(update={"api_keys": ()}), backends={}))
    assert status(keyed.url, "wrong") == 401


def test_what_needs_a_restart() -> None:
    before = Settings(server=ServerSettings(), backends={})
    up = OpenAISettings(base_url="http://127.0.0.1:9/v1")  # type: ignore[arg-type]
    after = Settings(server=ServerSettings(port=1, max_connections=9, max_concurrent=2), backends={"up": up})
    assert restart_needed(before, before) == []
    assert restart_needed(before, after) == ["server.port", "server.max_connections", "backends"]
    assert set(ServerSettings.model_fields) >= RELOADABLE


@pytest.mark.parametrize(
    ("now", "wanted", "taken"),
    [
        ({"base_urls": ["http://a/v1"]}, {"base_urls": ["http://b/v1"], "weight": 2.0}, True),
        ({"base_urls": ["http://a/v1"]}, {"base_urls_file": "servers"}, True),
        ({"base_urls": ["http://a/v1"]}, {"base_url": "http://a/v1"}, False),
        ({"base_urls": ["http://a/v1"]}, {"base_url": "http://a/v1", "resolve": "a"}, False),
        ({"base_url": "http://a/v1", "resolve": "a"}, {"base_urls": ["http://a/v1"]}, False),
        ({"base_url": "http://a/v1", "resolve": "a"}, {"base_url": "http://b/v1", "resolve": "a"}, False),
    ],
)
def test_servers_are_reloaded_only_if_they_are_found_in_the_same_way(now: Any, wanted: Any, taken: bool) -> None:
    """Else they would be looked for where neither the old settings nor the new ones say; that takes a restart."""
    before, after = OpenAISettings(**now), OpenAISettings(**wanted)
    found = with_servers({"a": before}, {"a": after})
    assert found == {"a": after if taken else before}


def test_a_signal_without_a_file_is_no_end(keyed: Any) -> None:
    one = reloader(keyed)
    with one.on_signal():
        os.kill(os.getpid(), signal.SIGHUP)
    asyncio.run(one.reload_if_asked())
    assert status(keyed.url, "secret") == 200
