"""Writes the pictures of the docs: run `make recording` on a quiet machine. demo.svg is what `agentspec demo` prints,
ui-VIEW.webp the page of `agentspec demo --ui`, once its model has answered sessions of a coding agent.
"""

from __future__ import annotations

import base64
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.text import Text

from agentspec.benchmarks.agent_workflows import measured_workflows

DOCS = Path(__file__).parent
PROGRAM = str(Path(sys.executable).with_name("agentspec"))
WIDTH = 100
URL = "http://127.0.0.1:8765"
STEPS = ("document", "rename", "copy")  # the kinds of turns that the sessions have, in this order


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


def terminal() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text("$ agentspec demo", style="bold"))
    console.print(Text.from_ansi(run(PROGRAM, "demo")))
    console.save_svg(str(DOCS / "demo.svg"), title="agentspec demo")


@contextmanager
def gateway() -> Iterator[None]:
    with subprocess.Popen([PROGRAM, "demo", "--ui", "--port", URL.rpartition(":")[2]]) as process:
        try:
            while process.poll() is None and not ready():
                time.sleep(0.5)
            yield
        finally:
            process.terminate()


def ready() -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{URL}/ready").is_success
    return False


def ask_sessions() -> None:
    """Two sessions, the first of them twice."""
    for number, session in enumerate(measured_workflows(len(STEPS))[index] for index in (0, 1, 0)):
        for turn, step in enumerate(STEPS):
            body = {"model": "smollm2-135m", "messages": session.messages(turn), "max_tokens": 64, "temperature": 0}
            labels = {"workflow": "coding agent", "step": step, "session": f"{session.name}-{number}"}
            headers = {f"x-agentspec-{name}": value for name, value in labels.items()}
            httpx.post(f"{URL}/v1/chat/completions", json=body, headers=headers, timeout=600).raise_for_status()


def picture(page: Page, name: str, width: int = 1120) -> None:
    """The page so wide and as high as it is, without Playwright's PNG, which is four times as large."""
    page.set_viewport_size({"width": width, "height": page.evaluate("document.body.scrollHeight")})
    options: dict[str, Any] = {"format": "webp", "quality": 80}
    made = page.context.new_cdp_session(page).send("Page.captureScreenshot", options)
    (DOCS / f"ui-{name}.webp").write_bytes(base64.b64decode(made["data"]))


def page_of_gateway(page: Page) -> None:
    def opened(view: str) -> None:
        page.set_viewport_size({"width": 1120, "height": 700})
        page.goto(f"{URL}/ui#/{view}")
        page.get_by_role("heading", level=1).wait_for()

    opened("now")
    ask_sessions()
    page.wait_for_timeout(2500)  # the next event
    picture(page, "now")
    for view in ("workflows", "cache"):
        opened(view)
        page.get_by_role("table").first.wait_for()
        picture(page, view)
    opened("runs")
    page.get_by_role("row").nth(1).get_by_role("link").click()  # the newest, whose calls were answered before
    page.locator("summary").nth(1).click()
    page.get_by_role("list", name="Tokens by source").wait_for()
    picture(page, "run")
    opened("playground")
    for _ in range(2):  # the second time most of the answer is drafted from the first
        page.get_by_role("button", name="Answer twice").click()
        page.get_by_text("dentical:").wait_for(timeout=300_000)
    picture(page, "playground")


def main() -> None:
    if "page" not in sys.argv:
        terminal()
    with gateway(), sync_playwright() as playwright:
        program = shutil.which("chromium") or playwright.chromium.executable_path
        page_of_gateway(playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]).new_page())


if __name__ == "__main__":
    main()
