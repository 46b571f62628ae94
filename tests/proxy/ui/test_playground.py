"""The Playground over a real engine with a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.cache.settings import CacheSettings
from agentspec.settings.load import Settings

pytest.importorskip("torch")


def test_two_answers_are_compared_and_coloured(
    shared_gateway: Any, tiny_model: Path, open_page: Any, violations: Any
) -> None:
    settings = Settings(
        cache=CacheSettings(runs_bytes=1 << 20), backends={"local": TorchSettings(model=str(tiny_model), device="cpu")}
    )
    page = open_page(f"{shared_gateway({}, settings).url}/ui")
    page.get_by_label("Prompt").fill("hello")
    page.get_by_label("Most tokens").fill("40")
    off, on = (page.get_by_role("group", name=f"Speculation {mode}", exact=True) for mode in ("off", "on"))
    for times in range(2):
        page.get_by_role("button", name="Answer twice").press("Enter")
        page.get_by_text("Identical: all 40 tokens are the same.").wait_for()
        assert off.inner_text() == on.inner_text()
        assert (
            off.locator(".token").count() == 0 and "One token for each forward" in page.locator(".sides").inner_text()
        )
        assert "is not known" not in page.locator(".sides").inner_text()
        assert on.locator(".token.shared").count() >= times, "the second time it was written before"
    assert page.get_by_role("list", name="Tokens by source").last.inner_text().count("earlier answers") == 1
    assert violations(page) == []
