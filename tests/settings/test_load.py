from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.cli import app
from agentspec.errors import ConfigurationError
from agentspec.reasoning.settings import STRATEGIES
from agentspec.settings.load import load_settings
from agentspec.settings.server import ApiKey

UPSTREAM = '[backends.vllm]\nkind = "openai"\nbase_url = "http://127.0.0.1:8000/v1"\n'
NAMED = f'[cache]\nmemory_bytes = "512MiB"\n{UPSTREAM}[models.fast]\nbackend = "vllm"\n'


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "agentspec.toml"
        path.write_text(text)
        return path

    return write


def shown(path: Path | None = None) -> dict[str, dict[str, str]]:
    """What `agentspec config show` prints of each key."""
    named = [] if path is None else ["--config", str(path)]
    rows = json.loads(CliRunner().invoke(app, ["config", "show", "--json", *named]).stdout)
    return {row["key"]: row for row in rows}


def test_the_example_is_complete_and_loads(repository):
    example = repository / "examples" / "agentspec.toml"
    written = example.read_text()
    missing = [key for key in shown(example) if key.rpartition(".")[2] not in written]
    missing += [key for strategy in STRATEGIES.values() for key in strategy.model_fields if key not in written]
    assert missing == []


def test_the_pair_for_strategies_loads(repository):
    settings = load_settings(repository / "examples" / "reasoning_pair" / "agentspec.toml")
    assert settings.models["qwen-fast"].strategy == "specreason"


def test_flags_over_environment_over_file_over_defaults(write, monkeypatch):
    path = write("[server]\nhost = 'file'\nport = 1\nmax_connections = 1\n")
    monkeypatch.setenv("AGENTSPEC_SERVER__PORT", "2")
    monkeypatch.setenv("AGENTSPEC_SERVER__HOST", "env")
    settings = load_settings(str(path), {"server": {"host": "flag"}})
    assert (settings.server.host, settings.server.port, settings.server.max_connections) == ("flag", 2, 1)
    assert settings.origin(("server", "host")) == ("flag", "")
    assert settings.origin(("server", "port")) == ("env", "AGENTSPEC_SERVER__PORT")
    assert settings.origin(("server", "max_connections")) == ("file", str(path))
    assert settings.origin(("server", "max_concurrent")) == ("default", "")


STRATEGY = "[backends.big]\nkind = 'openai'\nbase_url = 'http://h/v1'\nmodel = 'm'\n[backends.tiny]\nkind = 'torch'\n"

REFUSED = [
    ("[server]\nprot = 1", "server.prot: unknown key; did you mean 'port'?"),
    ("[servr]\nport = 1", "servr: unknown key; did you mean 'server'?"),
    ("[server]\nport = 'x'", "server.port = 'x': Input should be a valid integer"),
    ("backends = 3", "backends = 3: must be a table"),
    ("[backends]\nlocal = 3", "backends.local = 3: must be a table"),
    ("[cache]\npath = 'mysql://host/db'", "cache.path: must be a folder, or begin with postgresql://"),
    ("[backends.a]\nkind = 'tosh'", 'backends.a: set kind = "torch"'),
    ("[backends.a]\nkind = 'openai'", "backends.a: base_url is missing"),
    ("[backends.a]\nkind = 'openai'\nbase_url = 'nope'", "backends.a.base_url = 'nope': must be a whole address"),
    ("[backends.a]\nkind = 'openai'\nbase_url = 'host:8000'", "must be a whole address, such as http://host:8000/v1"),
    ("[cache]\nmemory_bytes = '1 gig'", "cache.memory_bytes = '1 gig': must be bytes, or text such as \"512MiB\""),
    ("[backends.local]\nmodle = 'x'", "backends.local.modle: unknown key; did you mean 'model'?"),
    ("[models.fast]\nbackend = 'locl'", "models.fast.backend = 'locl' names no backend; configured: local; did you"),
    ("[[server.api_keys]]\ntenant = 'a'", "server.api_keys.0: give exactly one of key_env and key_file"),
    ("[[server.api_keys]]\nkey_evn = 'a'", "server.api_keys.0.key_evn: unknown key; did you mean 'key_env'?"),
    ("[server]\nrequest_timeout = inf", "server.request_timeout = 'inf': Input should be a finite number"),
    ("[server]\nport = true", "server.port: must be a number, not true or false"),
    (
        "[[server.api_keys]]\nkey_file = 'x'\ntokens_per_minute = true",
        "server.api_keys.0.tokens_per_minute: must be a number",
    ),
    ("[server\n", "not valid TOML"),
    ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    ("[server]\nprot = 1\nport = true\n[cache]\npath = 3\n", "cache.path"),  # every mistake is reported at once
    *(
        (f"[knowledge.k]\n{table}\n", message)
        for table, message in [
            ('path = "x"', 'knowledge.k: set kind = "index"'),
            ('kind = "index"', "knowledge.k.path: missing"),
            ('kind = "index"\npath = "x"\npth = "y"', "knowledge.k.pth: unknown key; did you mean 'path'?"),
            ('kind = "remote"\nurl = "nowhere"', "knowledge.k.url = 'nowhere'"),
            ('kind = "remote"\nurl = "http://kb"\napi_key = "s3cret"', "AGENTSPEC_KNOWLEDGE__K__API_KEY"),
            ('kind = "remote"\nurl = "http://me:s3cret@kb"', "knowledge.k.url must not carry a password"),
        ]
    ),
    *(
        (f"{STRATEGY}[models.fast]\n{table}\n", message)
        for table, message in [
            ("strategy = 'specreasn'\nbase = 'big'\nsmall = 'tiny'", "models.fast.strategy: must be one of specreason"),
            ("strategy = 'specreason'\nbase = 'big'\nsmall = 'tny'", "did you mean 'tiny'?"),
            ("strategy = 'specreason'\nbase = 'fast'\nsmall = 'tiny'", "names no plain model and no backend"),
            ("strategy = 'specreason'\nbase = 'big'", "models.fast.small: missing"),
            ("strategy = 'lookahead'\nbase = 'big'\nsmall = 'tiny'\ndepht = 2", "did you mean 'depth'?"),
            ("strategy = 'lookahead'\nbase = 'big'\nsmall = 'tiny'\ndepth = 99", "models.fast.depth = '99': "),
        ]
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_mistake_is_refused_naming_file_key_and_remedy(write, text, message):
    path = write(text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(path)
    assert message in str(caught.value) and str(path) in str(caught.value) and "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        UPSTREAM + 'api_key = "sk-secret"',
        '[backends.vllm]\nkind = "openai"\nbase_url = "http://user:sk-secret@host/v1"',
        '[[server.api_keys]]\ntenant = "a"\nkey = "sk-secret"',
        '[server]\napi_keys = ["sk-secret"]',
        '[cache]\npath = "postgresql://user:sk-secret@host/db"',
        '[cache]\npath = "postgresql://user@host/db"\npassword = "sk-secret"',
    ],
)
def test_a_secret_in_the_file_is_refused_with_the_reason_and_not_repeated(write, text):
    with pytest.raises(ConfigurationError) as caught:
        load_settings(write(text))
    assert "files are copied and committed" in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_a_secret_from_the_environment_is_used_and_masked(write, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_BACKENDS__VLLM__API_KEY", "sk-secret")
    monkeypatch.setenv("AGENTSPEC_BACKENDS__UP__KIND", "openai")
    monkeypatch.setenv("AGENTSPEC_BACKENDS__UP__BASE_URL", "http://user:sk-secret@host/v1")
    path = write(UPSTREAM)
    settings = load_settings(path)
    backend = settings.backends["vllm"]
    assert isinstance(backend, OpenAISettings) and backend.api_key == SecretStr("sk-secret")
    assert "sk-secret" not in repr(backend) + str(shown(path)) and "****" in str(shown(path))


def test_the_caches_password_is_used_and_masked(write, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("sk-secret\n")
    monkeypatch.setenv("AGENTSPEC_CACHE__PASSWORD_FILE", str(secret))
    path = write('[cache]\npath = "postgresql://user@host/db"')
    assert load_settings(path).cache.location() == "postgresql://user:sk-secret@host/db"
    assert "sk-secret" not in str(shown(path))
    monkeypatch.delenv("AGENTSPEC_CACHE__PASSWORD_FILE")
    monkeypatch.setenv("AGENTSPEC_CACHE__PATH", "postgresql://user:sk-secret@host/db")
    assert load_settings().cache.location() == "postgresql://user:sk-secret@host/db"
    assert "sk-secret" not in str(shown())


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AGENTSPEC_SERVR__PORT", "1", "AGENTSPEC_SERVR__PORT: no section 'servr'; did you mean 'server'?"),
        ("AGENTSPEC_SERVER__PROT", "1", "AGENTSPEC_SERVER__PROT: server.prot: unknown key; did you mean 'port'?"),
        ("AGENTSPEC_SERVER_PORT", "1", "write AGENTSPEC_SERVER__PORT"),
        ("AGENTSPEC_CACHE_STORE", "false", "write AGENTSPEC_CACHE__STORE"),
        ("AGENTSPEC_CACHE_PTH", "x", "write AGENTSPEC_CACHE__PTH, with two underscores; did you mean 'path'?"),
        ("AGENTSPEC_SERVER__PORT", "x", "AGENTSPEC_SERVER__PORT: server.port = 'x'"),
        ("AGENTSPEC_SERVER__API_KEYS", "[{", "AGENTSPEC_SERVER__API_KEYS: not valid; lists are written as JSON"),
    ],
)
def test_a_mistaken_variable_is_refused_by_its_name(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert message in str(caught.value)


def test_the_environment_reaches_nested_values(monkeypatch):
    monkeypatch.setenv("AGENTSPEC_BACKENDS__LOCAL__DEVICE", "cpu")
    monkeypatch.setenv("AGENTSPEC_CACHE__STORE", "false")
    monkeypatch.setenv("AGENTSPEC_SERVER__API_KEYS", '[{"tenant": "a", "key_env": "KEY"}]')
    monkeypatch.setenv("AGENTSPEC_MODELS", "/somewhere")  # the model store's folder, no setting
    settings = load_settings()
    assert settings.backends == {"local": TorchSettings(device="cpu")}
    assert settings.cache.store is False
    assert settings.server.api_keys == (ApiKey(tenant="a", key_env="KEY"),)


def test_the_cache_folder_has_two_names(monkeypatch):
    monkeypatch.setenv("AGENTSPEC_CACHE_PATH", "/cache")
    settings = load_settings()
    assert settings.cache.path == Path("/cache")
    assert settings.origin(("cache", "path")) == ("env", "AGENTSPEC_CACHE_PATH")
    monkeypatch.setenv("AGENTSPEC_CACHE__PATH", "/cache")
    assert load_settings().cache.path == Path("/cache")
    monkeypatch.setenv("AGENTSPEC_CACHE__PATH", "/other")
    with pytest.raises(ConfigurationError, match="AGENTSPEC_CACHE_PATH and AGENTSPEC_CACHE__PATH differ"):
        load_settings()


def test_variables_match_names_with_case_and_dashes(write, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_BACKENDS__MY_VLLM__READ_TIMEOUT", "7")
    settings = load_settings(write('[backends.My-vLLM]\nkind = "openai"\nbase_url = "http://h/v1"\n'))
    assert list(settings.backends) == ["My-vLLM"]
    assert settings.backends["My-vLLM"].read_timeout == 7  # type: ignore[union-attr]


def test_only_overridden_backends_remain_when_asked(write, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_BACKENDS__VLLM__API_KEY", "unused")
    monkeypatch.setenv("AGENTSPEC_BACKENDS__UPSTREAM__API_KEY", "used")
    flags = {"backends": {"upstream": {"kind": "openai", "base_url": "http://other/v1"}}}
    settings = load_settings(write(NAMED), flags, only_overridden_backends=True)
    assert list(settings.backends) == ["upstream"]
    assert settings.backends["upstream"].api_key == SecretStr("used")  # type: ignore[union-attr]
    assert settings.models == {}
    assert settings.cache.memory_bytes == 512 << 20


def test_an_unreadable_file_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read the configuration file"):
        load_settings(tmp_path / "absent.toml")


def test_the_documented_settings_are_the_real_ones(repository):
    subprocess.run([sys.executable, str(repository / "docs" / "update.py"), "--check"], check=True)


@pytest.mark.parametrize(
    ("text", "overrides", "variable", "named"),
    [
        ('[[server]]\napi_keys = [{ key_env = "K", tenant = "a" }]', {"server": {}}, None, "server = "),
        ('[[server]]\napi_keys = [{ key_env = "K", tenant = "a" }]', {"server": {"port": 1}}, None, "server = "),
        ("[[server]]\nport = 1", {}, "AGENTSPEC_SERVER__HOST", "server = "),
        ('[[cache]]\nretention = "1d"', {"cache": {"store": True}}, None, "cache = "),
        ("[[backends.local]]\nmax_active = 1", {"backends": {"local": {"model": "m"}}}, None, "backends.local = "),
    ],
)
def test_a_list_in_place_of_a_table_is_refused_with_any_flags_and_variables(
    text: str,
    overrides: dict[str, object],
    variable: str | None,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway whose file says [[server]] would start without the keys in it, and serve everybody."""
    monkeypatch.setenv("K", "k" * 20)
    if variable:
        monkeypatch.setenv(variable, "127.0.0.1")
    (path := tmp_path / "agentspec.toml").write_text(text)
    with pytest.raises(ConfigurationError, match="must be a table") as caught:
        load_settings(path, overrides)
    assert named in caught.value.message
