"""Traces on disk, whoever else uses the folder."""

from __future__ import annotations

import os
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
    for ask in (TraceFolder(tmp_path).read, TraceFolder(tmp_path).delete):
        with pytest.raises(InvalidRequestError, match="no trace"):
            ask(trace)
