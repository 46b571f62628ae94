"""Traces on disk, whoever else uses the folder."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.reasoning.delegation.trace import TraceFolder


def test_what_another_process_deletes_meanwhile_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")  # listed, and not there any more
    folder = TraceFolder(tmp_path, keep=2)
    for age, trace in enumerate(("a", "b", "c")):
        folder.write(trace, [{"event": "head"}])
        os.utime(tmp_path / f"{trace}.jsonl", (age, age))
    folder.write("d", [{"event": "head"}])
    assert folder.ids() == ["d", "c"] and not caplog.records


@pytest.mark.parametrize("trace", ["none", "../none", "x" * 300, "a\0b"])
def test_an_id_that_no_trace_has(tmp_path: Path, trace: str) -> None:
    for ask in (TraceFolder(tmp_path).read,):
        with pytest.raises(InvalidRequestError, match="no trace"):
            ask(trace)


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
    assert TraceFolder(tmp_path).read("a") == [{"event": "head", "messages": {"1": "2j"}}]
