from __future__ import annotations

import io
import logging
import time
from contextlib import redirect_stderr

from agentspec.backends.model_store.progress import arriving, elapsing


class Terminal(io.StringIO):
    """Enough of a terminal for a progress bar to be drawn on it."""

    def isatty(self) -> bool:
        return True


def wait_for(text: str, terminal: Terminal) -> None:
    limit = time.monotonic() + 60
    while text not in terminal.getvalue():
        assert time.monotonic() < limit, terminal.getvalue()
        time.sleep(0.02)


def test_bytes_that_arrive_move_the_bar(tmp_path):
    terminal = Terminal()
    with redirect_stderr(terminal), arriving(tmp_path, 1 << 20, "fetching tiny", show=True):
        (tmp_path / "half").write_bytes(bytes(1 << 19))
        wait_for("fetching tiny:  50%", terminal)
    assert "100%" in terminal.getvalue()


def test_time_that_passes_is_shown():
    terminal = Terminal()
    with redirect_stderr(terminal), elapsing("preparing tiny", show=True):
        wait_for("preparing tiny [00:0", terminal)


def test_without_a_terminal_or_a_wish_there_is_only_a_log_line(tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO, "agentspec.models")
    with arriving(tmp_path, 1, "first", show=True), elapsing("second", show=False):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
    assert [record.getMessage() for record in caplog.records] == ["first", "second"]
