"""What the page shows of the gateway's work, of workflows and of the cache: to whom, and in a browser."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count, product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.cache.settings import CacheSettings
from agentspec.protocol.speculation import StepSpeculation
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ApiKey, ServerSettings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Speculation, Usage
from tests.proxy.conftest import key_files

HOSTILE = "<img src=x onerror=alert(1)>"
DATA = ("/ui/data/now", "/ui/data/workflows", "/ui/data/cache")
DELEGATED = StepSpeculation(accepted=30, steps=4, kept_tokens={"small": 30, "base": 10}, estimated_seconds_saved=1.5)


def key_of(name: str) -> dict[str, str]:
    return {"x-api-key": f"key-of-{name}"}


def ask(url: str, headers: dict[str, str] | None = None, *, status: int = 200, **labels: str) -> None:
    body = {"model": "local", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    labelled = {f"x-agentspec-{name}": label for name, label in labels.items()}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={**(headers or {}), **labelled}, timeout=60)
    assert answer.status_code == status, answer.text


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[ApiKey, ...]:
    """Two tenants' keys and an operator's."""
    return key_files(tmp_path_factory.mktemp("keys"), "alpha", "beta", operator="watch")


@pytest.fixture
def keyed(gateway: Any, keys: Any) -> Callable[[Any], Any]:
    return lambda backend: gateway({"local": backend}, api_keys=keys)


@pytest.fixture(scope="module")
def shared_engine(
    shared_gateway: Any, keys: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    settings = Settings(
        server=ServerSettings(api_keys=keys),
        backends={"engine": TorchSettings(model=str(tiny_model), device="cpu")},
        models={"local": ModelSettings(backend="engine")},
        cache=CacheSettings(path=tmp_path_factory.mktemp("cache")),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentspec.telemetry.history.EVERY", 0.3)
        yield shared_gateway({}, settings)


@pytest.fixture
def engine(shared_engine: Any) -> Any:
    """A gateway with an engine and a cache on disk, in which both tenants have two sessions."""
    forget(shared_engine.url, "watch", older_than="0s")
    for name, session in product(("alpha", "beta"), ("s1", "s2")):
        ask(shared_engine.url, key_of(name), session=session, workflow=quote(HOSTILE), step="plan")
    shared_engine.runtime.cache.flush()
    return shared_engine


def refuse(request: Any) -> None:
    request.answer(b"{}", 503)


def events(url: str, headers: dict[str, str] | None = None) -> Iterator[Any]:
    with httpx.stream("GET", f"{url}/ui/data/now", headers=headers) as stream:
        yield from (json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer's next event comes at once."""
    monkeypatch.setattr("agentspec.proxy.ui.views.EVENT_SECONDS", 0.01)
    monkeypatch.setattr("agentspec.telemetry.history.EVERY", 0.01)
    monkeypatch.setattr("agentspec.telemetry.history.FRESH", 0.0)


def test_points_are_the_metrics_between_two_readings(gateway: Any, upstream: Any, slept: None) -> None:
    """A reading may fall between the counts of one answer, so that only sums are exact."""
    spent = Answer("ok", usage=Usage(5, 20), speculation=Speculation(drafted=30, accepted=15, steps=10))
    pool = OpenAISettings(base_urls=(upstream(refuse).url, upstream(refuse).url))
    settings = Settings(backends={"pool": pool}, models={"m": ModelSettings(backend="pool")})
    running = gateway({"local": FakeBackend(spent, RuntimeError("wrong"))}, settings)
    totals, ratios, asked = Counter[str](), set(), 0
    for event in events(running.url):
        for point in event["points"]:
            totals.update({name: point[name] * point["seconds"] for name in ("requests", "failed", "tokens")})
            ratios.add((point["tokens_per_step"], point["acceptance"]["all"]))
        if asked < 2 or ((2, 0.5) not in ratios and asked < 60):
            for status in (200, 500):
                ask(running.url, status=status)
            asked += 2
        elif totals["requests"] > asked - 0.5 and totals["tokens"] > 10 * asked - 0.5:
            break
    assert totals == pytest.approx({"requests": asked, "failed": asked / 2, "tokens": 10 * asked})
    assert (2, 0.5) in ratios
    assert [(one["backend"], one["calls"], one["failures"]) for one in event["now"]["members"]] == [("pool", 0, 0)] * 2


def test_a_pools_server_with_our_plug_in_tells_which_drafts_were_accepted(
    gateway: Any, upstream: Any, slept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what it counts while it is watched, though it is older and begins anew after each fifth reading."""
    monkeypatch.setattr("agentspec.backends.pool.fleet.INTERVAL_SECONDS", 0.02)
    readings = count()

    def metrics() -> str:
        done = next(readings) % 5
        counts = {"draft": 1000 + 10 * done, "accepted": 900 + 4 * done}
        lines = [f'agentspec_drafter_{name}_tokens_total{{source="cache"}} {value}' for name, value in counts.items()]
        return "\n".join(["vllm:num_requests_running 0", *lines, ""])

    known = {"/metrics": metrics, "/v1/models": lambda: '{"data": [{"id": "m", "owned_by": "vllm"}]}'}
    server = upstream(lambda request: request.answer(known.get(request.target, lambda: "{}")().encode()))
    settings = Settings(
        backends={"up": OpenAISettings(base_url=server.url)}, models={"m": ModelSettings(backends=("up",))}
    )
    shares = set[float | None]()
    url = gateway({}, settings).url
    for event in events(url):
        shares.add(event["now"]["acceptance"].get("cache"))
        if shares > {None} and next(readings) > 20:
            break
    assert shares == {None, 0.4}
    [member] = httpx.get(f"{url}/fleet").json()["members"]
    assert {name: list(member[name]) for name in ("drafted", "accepted")} == {
        "drafted": ["cache"],
        "accepted": ["cache"],
    }


def test_an_upstream_that_is_alone_is_ready_or_failing_by_its_last_call(
    gateway: Any, upstream: Any, slept: None, until: Any
) -> None:
    answers = [(200, b'{"choices": []}'), (503, b"{}"), (400, b"{}")]
    states = []
    server = upstream(lambda request: request.answer(*answers[len(states) - 1][::-1]))
    running = gateway({}, Settings(backends={"up": server.backend(server_kind="other").settings}))

    def seen() -> tuple[Any, ...]:
        [one] = next(events(running.url))["now"]["members"]
        return tuple(one[name] for name in ("backend", "state", "in_flight", "calls", "failures"))

    states.append(seen())
    for status, _ in answers:
        ask(running.url, status=status)
        states.append(seen())
    kinds = ["unknown", "ready", "failing", "ready"]
    assert states == [("up", state, 0, calls, calls > 1) for calls, state in enumerate(kinds)]
    labels = {"backend": "up", "member": "up"}
    assert running.metric("agentspec_member_failures_total", **labels) == 1
    assert running.metric("agentspec_member_state", state="ready", **labels) == 1


def test_data_needs_a_known_key_and_what_concerns_all_an_operators(keyed: Any) -> None:
    url = keyed(FakeBackend("ok")).url
    for path in DATA:
        assert httpx.get(url + path).status_code == httpx.get(url + path, headers=key_of("nobody")).status_code == 401
    assert httpx.post(f"{url}/ui/data/cache/forget", json={"tenant": "alpha"}).status_code == 401
    assert httpx.get(f"{url}/ui/data/now", headers=key_of("alpha")).status_code == 403
    assert next(events(url, key_of("watch")))["now"]["running"] == 0


def test_viewers_and_points_are_bounded_and_a_stream_ends_with_its_viewer(
    keyed: Any, until: Any, slept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.proxy.ui.views.MOST_VIEWERS", 1)
    monkeypatch.setattr("agentspec.telemetry.history.POINTS", 3)
    running, seen, loads = keyed(FakeBackend("ok")), list[float](), set()
    with closing(events(running.url, key_of("watch"))) as viewer:
        while len(seen) < 30:
            seen += [point["at"] for point in next(viewer)["points"]]
            loads.add(running.app.metrics.in_flight._value.get())
        assert seen == sorted(set(seen)) and loads == {0.0}, "who watches is no load"
        refused = httpx.get(f"{running.url}/ui/data/now", headers=key_of("watch"))
        assert refused.json()["error"]["code"] == "overloaded"
    label = {"route": "/ui/data/now", "model": "", "outcome": "cancelled"}
    until(lambda: running.app.metrics.registry.get_sample_value("agentspec_requests_total", label) == 1)
    assert len(next(events(running.url, key_of("watch")))["points"]) == 3


def test_a_tenant_sees_its_own_workflows_and_an_operator_all(keyed: Any, until: Any) -> None:
    answer = Answer("a b", usage=Usage(prompt_tokens=3, completion_tokens=40), speculation=DELEGATED)
    running = keyed(FakeBackend(answer))
    for name in ("alpha", "beta", "beta"):
        ask(running.url, key_of(name), workflow=f"of {name}", step="plan", **{"early-tools": "2"})

    def rows(name: str) -> list[tuple[Any, ...]]:
        found = httpx.get(f"{running.url}/ui/data/workflows", headers=key_of(name)).json()["rows"]
        shown = ("tenant", "workflow", "step", "calls", "delegated_tokens", "early_tools")
        return [tuple(row[name] for name in shown) for row in found]

    until(lambda: sum(row[3] for row in rows("watch")) == 3)
    alpha, beta = ("alpha", "of alpha", "plan", 1, 30, 2), ("beta", "of beta", "plan", 2, 60, 4)
    assert (rows("alpha"), rows("beta"), rows("watch")) == ([alpha], [beta], [alpha, beta])


def holdings(url: str, name: str) -> dict[str, int]:
    """The cached answers by tenant that a key sees; disk and memory name the same tenants."""
    found = httpx.get(f"{url}/ui/data/cache", headers=key_of(name)).json()
    answers = {one["tenant"]: one["sequences"] for one in found["namespaces"] if one["sequences"]}
    assert found["disk"].keys() == answers.keys() and all(one["model"] == "engine" for one in found["namespaces"])
    return answers


def forget(url: str, name: str, **conditions: str) -> httpx.Response:
    return httpx.post(f"{url}/ui/data/cache/forget", json=conditions, headers=key_of(name), timeout=60)


def test_a_tenant_sees_and_forgets_its_own_alone(engine: Any) -> None:
    url = engine.url
    assert holdings(url, "watch") == {"alpha": 2, "beta": 2}
    assert holdings(url, "alpha") == {"alpha": 2} and holdings(url, "beta") == {"beta": 2}
    assert forget(url, "alpha", tenant="beta", session="s1").json()["forgotten"] == 1, "of its own"
    assert holdings(url, "watch") == {"alpha": 1, "beta": 2}
    answered = forget(url, "alpha", older_than="0s").json()
    assert answered.pop("erasure_pending") in (True, False), "its bytes go once no reader holds them"
    assert answered == {"forgotten": 1}
    assert holdings(url, "watch") == {"beta": 2}
    assert forget(url, "watch", tenant="beta", session="s2").json()["forgotten"] == 1
    for wrong in ({}, {"older_than": "soon"}, {"sesion": "s1"}, {"session": 1}):
        refused = forget(url, "watch", **wrong)
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    assert holdings(url, "watch") == {"beta": 1}


SHOTS = Path(os.environ["AGENTSPEC_SHOTS"]) if "AGENTSPEC_SHOTS" in os.environ else None


@pytest.mark.parametrize(
    "view", ["now", *(pytest.param(view, marks=pytest.mark.slow) for view in ("workflows", "cache"))]
)
def test_views_fit_a_screen_and_a_phone(engine: Any, open_page: Any, violations: Any, view: str) -> None:
    for width, dark in ((1280, False), (320, True)):
        page = open_page(f"{engine.url}/ui#/{view}", width=width, dark=dark, key="key-of-watch")
        page.get_by_role("heading", level=1, name=view.capitalize()).wait_for()
        charts, tables = page.get_by_role("img").first, page.get_by_role("table").first
        (charts if view == "now" else tables).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert violations(page) == [] and page.locator("main img, main script").count() == 0
        assert view != "workflows" or page.get_by_text(HOSTILE).count() == 2
        if SHOTS:
            page.screenshot(path=SHOTS / f"{view}-{width}.png", full_page=True)


def test_forgetting_is_confirmed_by_keyboard(engine: Any, open_page: Any, violations: Any) -> None:
    page = open_page(f"{engine.url}/ui#/cache", width=320, key="key-of-alpha")
    page.get_by_role("button", name="Forget of alpha").focus()
    page.keyboard.press("Enter")
    assert violations(page) == [] and page.get_by_role("textbox", name="Tenant").count() == 0
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert holdings(engine.url, "watch") == {"alpha": 2, "beta": 2}
    page.keyboard.press("Enter")
    page.get_by_label("Only this session").fill("s1")
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="Forgot 1").wait_for()
    assert holdings(engine.url, "watch") == {"alpha": 1, "beta": 2}
