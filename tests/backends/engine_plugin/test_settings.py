"""The environment variables of the drafter inside a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.backends.engine_plugin.settings import enabled, read_settings
from agentspec.errors import ConfigurationError


def test_every_setting_of_the_cache_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("p w")
    password = {"AGENTSPEC_CACHE__PASSWORD_FILE": str(tmp_path / "secret")}
    settings = read_settings("VLLM", {"AGENTSPEC_STORE_URL": "postgresql://me@db/agents", **password})
    assert settings.cache.location() == "postgresql://me:p%20w@db/agents"
    given = {"MEMORY_BYTES": "2GiB", "DISK_BYTES": "8GiB", "RETENTION": "30d", "REFUSE_PATTERNS": '["sk-\\\\w+"]'}
    environment = {f"AGENTSPEC_CACHE__{name}": value for name, value in given.items()}
    environment |= {"AGENTSPEC_CACHE_PATH": "/srv", "AGENTSPEC_TENANT": "acme"}
    settings = read_settings("VLLM", {**environment, "AGENTSPEC_VLLM_SALTS": '{"pepper": "other"}'})
    found = settings.cache
    assert (found.location(), found.memory_bytes, found.disk_bytes) == (Path("/srv"), 2 << 30, 8 << 30)
    assert (found.retention, found.refuse_patterns) == (30 * 86400, (r"sk-\w+",))
    assert (settings.tenant, settings.salts) == ("acme", {"pepper": "other"})


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"AGENTSPEC_CACHE__MEMORY_BYTES": "much"}, "AGENTSPEC_CACHE__MEMORY_BYTES"),
        ({"AGENTSPEC_CACHE__MEMORY": "1GiB"}, "AGENTSPEC_CACHE__MEMORY"),
        ({"AGENTSPEC_CACHE_MEMORY_BYTES": "1GiB"}, "AGENTSPEC_CACHE__MEMORY_BYTES, with two underscores"),
        ({"AGENTSPEC_CACHE__REFUSE_PATTERNS": "[1"}, "AGENTSPEC_CACHE__REFUSE_PATTERNS"),
        ({"AGENTSPEC_CACHE__REFUSE_PATTERNS": '["("]'}, "no regular expression"),
        ({"AGENTSPEC_CACHE_PATH": "/a", "AGENTSPEC_STORE_URL": "postgresql://db/b"}, "differ"),
        ({"AGENTSPEC_STORE_URL": "mysql://db/b"}, "postgresql://"),
        ({"AGENTSPEC_VLLM_SALTS": "pepper"}, "AGENTSPEC_VLLM_SALTS"),
        ({"AGENTSPEC_VLLM_SALTS": '["pepper"]'}, "JSON object"),
        ({"AGENTSPEC_VLLM_SALTS": '{"pepper": 1}'}, "AGENTSPEC_VLLM_SALTS: a tenant"),
        ({"AGENTSPEC_VLLM_SALTS": '{"pepper": ""}'}, "AGENTSPEC_VLLM_SALTS: a tenant"),
    ],
)
def test_what_cannot_work_is_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named.replace("(", r"\(")) as raised:
        read_settings("VLLM", environment)
    assert "pepper" not in str(raised.value).lower(), "a salt is a secret"


def test_each_engine_has_its_own_switch_and_salts() -> None:
    environment = {"AGENTSPEC_SGLANG": "off", "AGENTSPEC_SGLANG_SALTS": '{"pepper": "a"}', "PATH": "/bin"}
    assert enabled("VLLM", environment) and not enabled("SGLANG", environment)
    assert read_settings("SGLANG", environment).salts == {"pepper": "a"}
    settings = read_settings("VLLM", environment)
    assert (settings.salts, settings.tenant, settings.cache.location()) == ({}, "default", None)
    with pytest.raises(ConfigurationError, match="on or off"):
        enabled("VLLM", {"AGENTSPEC_VLLM": "perhaps"})
