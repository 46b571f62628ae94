"""Traces on disk, whoever else uses the folder."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.errors import ConfigurationError
from agentspec.langchain import ChatAgentSpec
from agentspec.reasoning.delegation import trace
from agentspec.reasoning.delegation.trace import TraceFolder, open_folder
from agentspec.reasoning.settings import SpecReasonSettings, TraceSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from tests.thinking_model import ThinkingModel


def test_what_another_process_deletes_meanwhile_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "KEPT", 2)
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")  # listed, and not there any more
    folder = TraceFolder(tmp_path)
    for age, name in enumerate(("a", "b", "c")):
        folder.write(name, [{"event": "head"}])
        os.utime(tmp_path / f"{name}.jsonl", (age, age))
    folder.write("d", [{"event": "head"}])
    assert folder.ids() == ["d", "c"] and not caplog.records


def test_a_full_disk_leaves_no_half_of_a_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, (soft, hard) = TraceFolder(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        folder.write("a", [{"event": "head", "text": "x" * 500}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder.ids() == [] and "a trace was not kept" in caplog.text


def test_what_json_has_no_word_for_is_described(tmp_path: Path) -> None:
    """A request with such messages is refused, and its error is not to be hidden by the trace's."""
    TraceFolder(tmp_path).write("a", [{"event": "head", "messages": {1: 2j}}])
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"event": "head", "messages": {"1": "2j"}}


def test_an_answers_file_holds_every_decision(tmp_path: Path) -> None:
    def step(word: str) -> Callable[[str], str]:
        return lambda thinking: f"{word} {thinking.count(chr(10) * 2)}{' Answer: 4' if thinking else ''}\n\n"

    settings = Settings(
        backends={"large": TorchSettings(model="l"), "tiny": TorchSettings(model="t")},
        models={"fast": SpecReasonSettings(base="large", small="tiny")},
        traces=TraceSettings(path=tmp_path / "traces"),
    )
    judged = ThinkingModel(step("base"), score=lambda step: "3" if "0" in step else "8")
    runtime = Runtime(settings, backends={"large": judged, "tiny": ThinkingModel(step("small"))})
    answer = ChatAgentSpec(model="fast", runtime=runtime).invoke("Two plus two?")
    file = tmp_path / "traces" / f"{answer.response_metadata['speculation']['trace']}.jsonl"
    events = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    told = ["head", "proposed", "scored", "rewritten", "proposed", "scored", "accepted", "ended", "answer"]
    assert [event for event in events if event in told] == told


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"traces\.path"):
        open_folder(TraceSettings(path=tmp_path / "file" / "traces"))
