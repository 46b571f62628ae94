from __future__ import annotations

import pytest
from rich.console import Console

from agentspec.cli.recorded_files import choose
from agentspec.recordings.calls import BadLineError


def test_bad_lines_are_refused_or_kept_count_of(capsys):
    error = BadLineError("f[bold]:1", "not [red]JSON")
    on_bad, bad = choose(False, Console(stderr=True))
    with pytest.raises(BadLineError):
        on_bad(error)
    on_bad, bad = choose(True, Console(stderr=True))
    on_bad(error)
    assert bad == [error] and "left out: f[bold]:1: not [red]JSON" in capsys.readouterr().err
