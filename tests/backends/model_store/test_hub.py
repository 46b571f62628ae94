from __future__ import annotations

import pytest
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from agentspec.backends.model_store.hub import ALLOWED, can_fetch, is_hub_id, quiet_bars, snapshot
from agentspec.errors import ModelUnavailableError


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("org/name", True),
        ("Qwen/Qwen3-0.6B", True),
        ("name", False),
        ("a/b/c", False),
        ("../x", False),
        ("/abs", False),
        ("~/x", False),
    ],
)
def test_the_shape_of_a_hub_id(ref, expected):
    assert is_hub_id(ref) is expected


def test_no_format_that_runs_code_is_asked_for():
    assert not [pattern for pattern in ALLOWED if pattern.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".py"))]


@pytest.fixture
def no_hub(monkeypatch):
    """The hub client as it is without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_without_the_hub_the_error_says_what_else_can_be_done(no_hub):
    with pytest.raises(ModelUnavailableError, match=r"cannot fetch 'nobody/nothing'[\s\S]*local folder or \.gguf file"):
        snapshot("nobody/nothing", show=False)
    assert not can_fetch("nobody/nothing")


def test_the_hub_clients_bars_are_put_back():
    enable_progress_bars()
    with quiet_bars():
        assert are_progress_bars_disabled()
    assert not are_progress_bars_disabled()
    disable_progress_bars()
    with quiet_bars():
        pass
    assert are_progress_bars_disabled()
    enable_progress_bars()
