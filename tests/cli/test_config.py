from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentspec.backends.openai import TenantIsolation

UPSTREAM = '[backends.up]\nkind = "openai"\nbase_url = "http://127.0.0.1:1/v1"\n'


def test_show_prints_every_value_with_its_source(program, monkeypatch):
    Path("agentspec.toml").write_text("[server]\nport = 1\n" + UPSTREAM)
    monkeypatch.setenv("AGENTSPEC_SERVER__HOST", "0.0.0.0")
    monkeypatch.setenv("AGENTSPEC_BACKENDS__UP__API_KEY", "sk-secret")
    result = program("config", "show")
    lines = {line.partition(" = ")[0]: line.split() for line in result.output.splitlines()}
    assert lines["server.port"][-2:] == ["file", "agentspec.toml"]
    assert lines["server.host"][-2:] == ["env", "AGENTSPEC_SERVER__HOST"]
    assert lines["cache.path"][2:] == ["unset", "#", "default"]
    assert "sk-secret" not in result.output
    rows = json.loads(program("config", "show", "--json").output)
    assert {"key": "server.drain_timeout", "value": 30.0, "source": "default", "origin": ""} in rows


def test_the_option_comes_before_the_variable_and_the_file_in_the_folder(program, tmp_path, monkeypatch):
    for port, name in enumerate(("agentspec.toml", "variable.toml", "named.toml"), 1):
        Path(name).write_text(f"[server]\nport = {port}\n")
    assert "server.port = 1 " in program("config", "show").output
    monkeypatch.setenv("AGENTSPEC_CONFIG", str(tmp_path / "variable.toml"))
    assert "server.port = 2 " in program("config", "show").output
    assert "server.port = 3 " in program("config", "show", "--config", "named.toml").output


def test_check_finds_nothing_wrong(program):
    assert program("config", "check").output == "ok: no configuration file; environment and defaults\n"
    for encoding in ("utf-8", "utf-8-sig"):  # the second as editors on Windows write it
        Path("agentspec.toml").write_text(UPSTREAM, encoding=encoding)
        assert program("config", "check").output == "ok: agentspec.toml\n"


def test_check_reports_what_cannot_work(program):
    for text, message in [
        ("[server]\nprot = 1\n", "did you mean 'port'?"),
        ('[[server.api_keys]]\nkey_env = "ABSENT"\n', "'ABSENT'"),
        (UPSTREAM + 'api_key_file = "absent"\n', "cannot read the key file 'absent'"),
        (UPSTREAM + 'api_key_file = "agentspec.toml"\n', "must be a single line"),
        ('[model_aliases]\n"gpt-5" = "qwen"\n', "names no model; configured: 'smollm2-135m'"),
        ('[model_aliases]\n"smollm2-135m" = "x"\n', "is the name of a model already"),
        ('[cache]\npath = "agentspec.toml"\n', "agentspec.toml' is a file"),
        ('[cache]\npath = "agentspec.toml/below"\n', "agentspec.toml' is a file"),
        ("# café\n\n[server]\n# é\n", "line 1 is not UTF-8: save the file as UTF-8"),
        ('\n\n[cache]\npath = "Müller"\n', "line 4 is not UTF-8"),
    ]:
        Path("agentspec.toml").write_bytes(text.encode("latin-1"))
        result = program("config", "check")
        assert result.exit_code == 2
        assert message in result.stderr


KEY = '[[server.api_keys]]\nkey_env = "HOME"\n'


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (UPSTREAM + '[backends.local]\nkind = "torch"\n', ["backends.up: add", 'backend = "up"', "backends.up.model"]),
        (KEY, ["no key can read /metrics"]),
        (KEY + '[[server.api_keys]]\nrole = "operator"\nkey_env = "PATH"\n', []),
    ],
)
def test_check_notes_unreachable_backends_and_metrics(program, text, notes):
    Path("agentspec.toml").write_text(text)
    result = program("config", "check")
    found = [line for line in result.output.splitlines() if line.startswith("note: ")]
    assert result.exit_code == 0 and len(found) == bool(notes) and all(one in found[0] for one in notes)


def test_show_salts_prints_the_salts_that_the_gateway_sends(program, monkeypatch):
    keys = "".join(f'[[server.api_keys]]\ntenant = "{tenant}"\nkey_env = "KEY_{tenant}"\n' for tenant in "ab")
    Path("agentspec.toml").write_text(UPSTREAM + keys)
    refused = program("config", "show", "--salts")
    assert refused.exit_code == 2 and "AGENTSPEC_SERVER__SECRET" in refused.stderr
    monkeypatch.setenv("AGENTSPEC_SERVER__SECRET", "s" * 32)
    found = json.loads(program("config", "show", "--salts").output)
    isolation = TenantIsolation(b"s" * 32, required=True)
    assert found == {isolation.salt(tenant, None): tenant for tenant in "ab"}
