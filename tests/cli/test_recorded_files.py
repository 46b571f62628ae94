from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from agentspec.cli.recorded_files import choose, counted, progress, recorded_calls
from agentspec.errors import ConfigurationError
from agentspec.recordings.calls import BadLineError, refuse


def test_bad_lines_are_refused_or_kept_count_of(capsys):
    error = BadLineError("f[bold]:1", "not [red]JSON")
    on_bad, bad = choose(False, Console(stderr=True))
    with pytest.raises(BadLineError):
        on_bad(error)
    on_bad, bad = choose(True, Console(stderr=True))
    on_bad(error)
    assert bad == [error] and "left out: f[bold]:1: not [red]JSON" in capsys.readouterr().err


def test_progress_goes_to_stderr(capsys):
    with progress() as (_, advance):
        assert list(counted(iter("abc"), "file [1]", advance)) == ["a", "b", "c"]
    captured = capsys.readouterr()
    assert captured.out == "" and "file [1]" in captured.err


def test_counts_stay_whole_beside_a_long_path(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with progress() as (_, advance):
        advance("/a/path/of/many/folders" * 10, 123_456, total=654_321)
    assert "123456" in capsys.readouterr().err


def test_an_export_has_no_calls(tmp_path: Path):
    (tmp_path / "f").write_text('{"agentspec_export": 1}\n')
    with pytest.raises(ConfigurationError, match="holds tokens"):
        recorded_calls(tmp_path / "f", None, refuse)
