"""Models with several servers: what is refused, and which pools come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.backends.settings import PoolSpec, PoolTarget
from agentspec.errors import ConfigurationError
from agentspec.placement import DEFAULT_POLICY, POLICIES
from agentspec.settings.load import Settings, load_settings
from agentspec.settings.models import model_names, named_model, open_fleet, pool_specs, unreachable

UPSTREAMS = """
[backends.a]
kind = "openai"
base_url = "http://a:8000/v1"
[backends.b]
kind = "openai"
base_urls = ["http://b1:8000/v1", "http://b2:8000/v1"]
model = "served"
[backends.here]
kind = "torch"
"""


def load(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "agentspec.toml"
    path.write_text(UPSTREAMS + text)
    return load_settings(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.m]\n", "models.m: set either backend (one) or backends (a list)"),
        ('[models.m]\nbackend = "a"\nbackends = ["b"]\n', "models.m: set either backend (one) or backends (a list)"),
        ("[models.m]\nbackends = []\n", "models.m.backends"),
        ('[models.m]\nbackends = ["a", "a"]\n', "models.m: backends names 'a' twice"),
        ('[models.m]\nbackends = ["a", "bb"]\n', "models.m.backends = 'bb' names no backend"),
        ('[models.m]\nbackends = ["a", "here"]\n', "models.m.backends = 'here': only backends of kind openai"),
        ('[models.m]\nbackends = ["a"]\nplacement = "round_robbin"\n', "did you mean 'round_robin'?"),
        ('[backends.c]\nkind = "openai"\nbase_urls = []\n', "backends.c.base_urls"),
        ('[backends.c]\nkind = "openai"\nbase_urls = ["http://x/v1", "http://x/v1"]\n', "names x:80/v1 twice"),
        (
            '[backends.c]\nkind = "openai"\nbase_url = "http://x/v1"\nbase_urls = ["http://y/v1"]\n',
            "backends.c: set one of base_url and base_urls",
        ),
        ('[backends.c]\nkind = "openai"\nbase_urls = ["http://x/v1"]\nresolve = "a"\n', 'resolve = "a" looks up'),
        ('[backends.c]\nkind = "openai"\nbase_urls = ["http://u:p@x/v1"]\n', "must not carry a password"),
        ("[fleet]\nfailuress = 1\n", "did you mean 'failures'?"),
        ("[fleet]\nopen_seconds = 0\n", "fleet.open_seconds"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)


def test_a_pool_asks_each_backend_for_its_own_name_of_the_model(tmp_path: Path) -> None:
    settings = load(tmp_path, '[models.m]\nbackends = ["a", "b"]\nplacement = "round_robin"\n'
                              '[models.plain]\nbackend = "a"\nupstream_model = "small"\n')  # fmt: skip
    specs = pool_specs(settings)
    assert specs["models.m"] == PoolSpec("models.m", (PoolTarget("a", "m"), PoolTarget("b", "served")), "round_robin")
    assert specs["b"] == PoolSpec("b", (PoolTarget("b", "served"),), DEFAULT_POLICY)
    assert model_names(settings)["m"][0] == "models.m"
    assert model_names(settings)["plain"] == ("a", "small")
    assert named_model(settings, "b") == ("b", "served")
    assert list(unreachable(settings)) == ["here"]


def test_one_server_is_one_member_of_all_pools_that_it_is_in(tmp_path: Path) -> None:
    settings = load(tmp_path, '[models.m]\nbackends = ["a", "b"]\n[models.n]\nbackends = ["a"]\n')
    fleet = open_fleet(settings, {})
    assert fleet is not None
    members = {name: [member for member, _ in backend.pool.members()] for name, backend in fleet.backends.items()}
    assert [one.name for one in members["models.m"]] == ["a", "b/b1:8000", "b/b2:8000"]
    assert members["models.n"][0] is members["models.m"][0]


def test_without_several_servers_there_is_no_pool(tmp_path: Path) -> None:
    path = tmp_path / "agentspec.toml"
    path.write_text('[backends.a]\nkind = "openai"\nbase_url = "http://a:8000/v1"\n[models.m]\nbackend = "a"\n')
    assert open_fleet(load_settings(path), {}) is None
    assert set(POLICIES) >= {"round_robin", "least_loaded", DEFAULT_POLICY}
