"""Models with several servers: what is refused, and which pools come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.errors import ConfigurationError
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings, load_settings
from agentspec.testing import FakeBackend

pytestmark = pytest.mark.anyio

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
        ('[models.m]\nbackends = ["a"]\nplacement = "round_robbin"\n', "'round_robin', 'least_loaded' or 'workflow'"),
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
def test_models_and_pools_that_cannot_work_are_refused_by_their_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)


POOLS = """
[models.m]
backends = ["a", "b"]
placement = "round_robin"
[models.n]
backends = ["a"]
[models.plain]
backend = "a"
upstream_model = "small"
"""


async def test_a_pool_asks_each_backend_for_its_own_name_of_the_model(tmp_path: Path) -> None:
    async with Runtime(load(tmp_path, POOLS), backends={"here": FakeBackend()}) as runtime:
        routes = {name: runtime.route(name) for name in ("m", "n", "plain")}
        assert {name: route.backend_name for name, route in routes.items()} == {
            "m": "models.m",
            "n": "models.n",
            "plain": "a",
        }
        assert routes["plain"].upstream_model == "small" and runtime.fleet is not None
        members = {name: list(one.pool.members()) for name, one in runtime.fleet.backends.items()}
        assert [(one.name, model) for one, model in members["models.m"]] == [
            ("a", "m"), ("b/b1:8000", "served"), ("b/b2:8000", "served")
        ]  # fmt: skip
        assert members["models.n"][0][0] is members["models.m"][0][0]  # one server is one member of all its pools
        assert [model for _, model in members["b"]] == ["served"] * 2
