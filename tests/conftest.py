"""Fixtures for every test. The user's own configuration never reaches a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentspec.backends.model_store import ModelFiles, resolve

_KEPT = {"AGENTSPEC_MODELS"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long tests run when asked for by name of their marker."""
    if "long" not in config.option.markexpr:
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="long; run with: pytest -m long"))


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """Without `AGENTSPEC_...` variables, save where the models lie."""
    names = [name for name in os.environ if name.startswith("AGENTSPEC_") and name not in _KEPT]
    removed = {name: os.environ.pop(name) for name in names}
    yield
    os.environ.update(removed)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    """The default model's files, fetched if need be. Tests that use it carry `@pytest.mark.model`."""
    return resolve("smollm2-135m", progress=False)
