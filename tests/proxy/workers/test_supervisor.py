from __future__ import annotations

from pathlib import Path

from pydantic import HttpUrl

from agentspec.backends.settings import OpenAISettings
from agentspec.cache.settings import CacheSettings
from agentspec.proxy.workers.supervisor import needs_engine
from agentspec.settings.load import Settings


def test_the_process_that_stores_usage_is_there_before_a_reload_brings_keys(tmp_path: Path) -> None:
    up = {"up": OpenAISettings(base_url=HttpUrl("http://127.0.0.1:9/v1"))}
    assert needs_engine(Settings(backends={**up}, cache=CacheSettings(store=False, path=tmp_path)))
    assert not needs_engine(Settings(backends={**up}, cache=CacheSettings(store=False)))
