"""Traces on disk, whoever else uses the folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.errors import ConfigurationError
from agentspec.langchain import ChatAgentSpec
from agentspec.reasoning.settings import SpecReasonSettings, TraceSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from tests.thinking_model import ThinkingModel


def runtime(folder: Path) -> Runtime:
    models: Any = {name: ThinkingModel(lambda thinking: "so Answer: 4\n\n") for name in ("large", "tiny")}
    settings = Settings(
        backends={name: TorchSettings(model=name) for name in models},
        models={"fast": SpecReasonSettings(base="large", small="tiny")},
        traces=TraceSettings(path=folder),
    )
    return Runtime(settings, backends=models)


def asked(folder: Path, text: Any = "Two plus two?") -> Path:
    """Ask a question, and return the file of its trace."""
    answer = ChatAgentSpec(model="fast", runtime=runtime(folder)).invoke(text)
    return folder / f"{answer.response_metadata['speculation']['trace']}.jsonl"


def test_the_newest_200_stay_whatever_another_process_deletes_at_the_same_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")  # listed, and not there any more
    for age in range(200):
        (tmp_path / f"{age}.jsonl").write_text("{}\n")
        os.utime(tmp_path / f"{age}.jsonl", (age, age))
    new = asked(tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - {"gone.jsonl"}
    assert left == {new.name, *(f"{age}.jsonl" for age in range(1, 200))} and not caplog.records


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"traces\.path"):
        runtime(tmp_path / "file" / "traces").start()
