from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.settings.load import Settings


@pytest.fixture
def served(monkeypatch) -> list[Settings]:
    """What the command hands to the server, which the tests of the gateway start for real."""
    import agentspec.proxy.serving

    given: list[Settings] = []
    monkeypatch.setattr(agentspec.proxy.serving, "serve", lambda settings, log_level: given.append(settings))
    return given


def test_without_options_the_defaults_are_served(program, served):
    assert program("serve").exit_code == 0
    assert served == [Settings()]


def test_a_model(program, served):
    assert program("serve", "--model", "org/name", "--host", "::1", "--port", "0").exit_code == 0
    assert served[0].backends == {"local": TorchSettings(model="org/name")}
    assert (served[0].server.host, served[0].server.port) == ("::1", 0)


def test_an_upstream_replaces_the_configured_backends(program, served, monkeypatch):
    Path("agentspec.toml").write_text(
        '[server]\nport = 1\n[models.fast]\nbackend = "local"\n[backends.local]\nkind = "torch"'
    )
    monkeypatch.setenv("AGENTSPEC_BACKENDS__UPSTREAM__API_KEY", "key")
    assert program("serve", "--upstream", "http://127.0.0.1:8000/v1").exit_code == 0
    backend = served[0].backends["upstream"]
    assert isinstance(backend, OpenAISettings)
    assert backend.api_key is not None
    assert (list(served[0].backends), served[0].models, served[0].server.port) == (["upstream"], {}, 1)


def test_nothing_is_recorded_when_asked(program, served):
    assert program("serve", "--no-store").exit_code == 0
    assert served[0].cache.store is False


def test_both_are_refused(program, served):
    result = program("serve", "--model", "a", "--upstream", "http://b")
    assert result.exit_code == 2
    assert served == []


def test_a_mistaken_upstream_is_refused(program, served):
    result = program("serve", "--upstream", "nope")
    assert result.exit_code == 2
    assert "command line: backends.upstream.base_url = 'nope'" in result.stderr
