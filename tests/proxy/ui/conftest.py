"""A real headless Chromium, that of the system or Playwright's own, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("AGENTSPEC_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for a module. Between modules Playwright ends, or its event loop would run on in other tests."""
    api = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")
    with api.sync_playwright() as playwright:
        program = CHROMIUM or playwright.chromium.executable_path
        if not Path(program).exists():
            pytest.skip(
                "the page was not opened, there is no Chromium: apt-get install chromium, or playwright install"
            )
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        with closing(browser):
            yield browser


@pytest.fixture
def open_page(chromium: Any) -> Iterator[OpenPage]:
    """`open_page(url, width=1280, dark=False, key=None)` in a context of its own. At the end, no page may have logged
    an error or been refused something by its policy: a script's mistake fails the test.
    """
    wrong: list[str] = []
    with ExitStack() as stack:

        def opened(url: str, *, width: int = 1280, dark: bool = False, key: str | None = None) -> Any:
            scheme = "dark" if dark else "light"
            context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = stack.enter_context(closing(context)).new_page()
            page.on("pageerror", lambda error: wrong.append(f"{error}"))
            page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
            if key is not None:
                page.add_init_script(f"sessionStorage.setItem('agentspec.key', '{key}')")
            page.goto(url)
            return page

        yield opened
    assert [line for line in wrong if "status of 401" not in line] == []


@pytest.fixture(scope="session")
def violations() -> Callable[[Any], list[str]]:
    """What axe-core finds wrong with a page for those who hear it or use a keyboard."""
    package = pytest.importorskip("axe_playwright_python", reason="no axe-core: pip install axe-playwright-python")
    script = Path(package.__file__).with_name("axe.min.js").read_text()

    def found(page: Any) -> list[str]:
        page.evaluate(script)
        result = page.evaluate("axe.run()")
        return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in result["violations"]]

    return found
