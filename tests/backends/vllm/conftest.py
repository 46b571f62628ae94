from __future__ import annotations

import pytest

from agentspec.backends.vllm import drafting


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that wait for their drafts however busy the machine is."""
    monkeypatch.setattr(drafting, "PATIENCE", 60.0)
