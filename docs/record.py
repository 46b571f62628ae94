"""Writes demo.svg, the terminal as `agentspec demo` leaves it: run `make recording` on a quiet machine."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100


def run(*command: str) -> str:
    """What a command prints on a terminal; of lines that it writes over, the last state."""
    parts: list[bytes] = []

    def read(terminal: int) -> bytes:
        parts.append(data := os.read(terminal, 1024))
        return data

    os.environ.update(COLUMNS=str(WIDTH), TERM="xterm-256color")
    if status := pty.spawn(command, read):
        sys.exit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    text = b"".join(parts).decode().replace("\r\n", "\n")
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    return re.sub(r"\x1b\[\??\d*[A-Za-ln-z]", "", "\n".join(lines)).rstrip()  # all but colours


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text("$ agentspec demo", style="bold"))
    console.print(Text.from_ansi(run(str(Path(sys.executable).with_name("agentspec")), "demo")))
    console.save_svg(str(Path(__file__).with_name("demo.svg")), title="agentspec demo")


if __name__ == "__main__":
    main()
