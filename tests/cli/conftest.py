from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

Program = Callable[..., Result]


@pytest.fixture(scope="package", autouse=True)
def shared_tokenizers() -> Iterator[None]:
    """One tokenizer for all commands that read the same folder: to make it takes half a second."""
    from agentspec.backends.torch import loader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "read_tokenizer", functools.cache(loader.read_tokenizer))
        yield


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """`program("model", "fetch")` runs the command in an empty folder with a model store of its own."""
    from agentspec.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTSPEC_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("TERM", "dumb")
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder in which only the names matter."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder
