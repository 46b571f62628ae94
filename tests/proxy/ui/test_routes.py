"""The page in a browser: who may open it, what its files may do, and that all can use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.testing import FakeBackend
from tests.proxy.conftest import key_files


@pytest.fixture
def keyed(gateway: Any, tmp_path: Path) -> Any:
    """A gateway with two tenants' keys and an operator's."""
    return gateway({"local": FakeBackend("ok")}, api_keys=key_files(tmp_path, "alpha", "beta", operator="watch"))


def test_files_hold_no_data_and_need_no_key_but_data_does(keyed: Any) -> None:
    policy = {"script-src 'self'", "default-src 'none'", "require-trusted-types-for 'script'"}
    for path in ("/ui", "/ui/app.js", "/ui/style.css"):
        answer = httpx.get(keyed.url + path)
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        assert policy <= set(answer.headers["content-security-policy"].split("; "))
    assert httpx.get(f"{keyed.url}/ui/data/session").status_code == 401
    for name in ("alpha", "beta", "watch"):
        session = httpx.get(f"{keyed.url}/ui/data/session", headers={"x-api-key": f"key-of-{name}"}).json()
        assert (session["tenant"], session["uses_models"]) == (name, name != "watch")


def test_the_page_can_be_turned_off(gateway: Any) -> None:
    running = gateway({"local": FakeBackend("ok")}, ui=False)
    assert {httpx.get(running.url + path).status_code for path in ("/ui", "/ui/app.js", "/ui/data/session")} == {404}


def test_a_page_of_another_name_gets_nothing(gateway: Any) -> None:
    """Without keys: a web page could make its own name point at this machine."""
    running = gateway({"local": FakeBackend("ok")})
    assert httpx.get(f"{running.url}/ui", headers={"host": "evil.example"}).status_code == 421


def test_a_key_is_asked_for_by_keyboard_and_stays_in_the_tab(keyed: Any, open_page: Any, violations: Any) -> None:
    page = open_page(f"{keyed.url}/ui")
    page.get_by_role("heading", name="API key").wait_for()
    assert violations(page) == []
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="not known here").wait_for()
    page.keyboard.type("key-of-alpha")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Playground").wait_for()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.reload()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="API key").wait_for()


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_shell_fits_a_phone_and_a_reader(gateway: Any, open_page: Any, violations: Any, dark: bool) -> None:
    running = gateway({"local": FakeBackend("ok")})
    page = open_page(f"{running.url}/ui", width=320, dark=dark)
    page.get_by_role("heading", name="Playground").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert violations(page) == []
