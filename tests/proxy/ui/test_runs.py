"""Kept runs: who sees them and when they go, and how the page and a file show them, whatever text they hold."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentspec import cli
from agentspec.backends.settings import TorchSettings
from agentspec.cache import SuffixCache
from agentspec.cache.settings import CacheSettings
from agentspec.cache.stored import StoredResponse
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import FakeBackend
from tests.proxy.conftest import key_files
from tests.thinking_model import ThinkingModel

CHAT = "/v1/chat/completions"
TENANTS = ("alpha", "beta")


def kept(server: ServerSettings | None = None, **cache: Any) -> Settings:
    return Settings(server=server or ServerSettings(), cache=CacheSettings(runs_bytes=32 << 20, **cache), backends={})


@pytest.fixture(scope="module")
def keyed(shared_gateway: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    keys = key_files(tmp_path_factory.mktemp("keys"), *TENANTS)
    backend = FakeBackend(lambda request: request.messages[-1]["content"])
    return shared_gateway({"local": backend}, kept(ServerSettings(api_keys=keys)))


def ask(url: str, text: str = "hello", *, tenant: str = "", stream: bool = False, **headers: str) -> None:
    body = {"model": "local", "messages": [{"role": "user", "content": text}], "stream": stream}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    assert (
        httpx.post(url + CHAT, json=body, headers={"x-api-key": f"key-of-{tenant}", **given}, timeout=60).status_code
        == 200
    )


def seen(url: str, path: str = "runs", *, tenant: str = "", **query: str) -> Any:
    return httpx.get(f"{url}/ui/data/{path}", params=query, headers={"x-api-key": f"key-of-{tenant}"}, timeout=60)


calls = st.tuples(st.sampled_from(TENANTS), st.sampled_from(["s", "other", ""]), st.booleans(), st.booleans())


@settings(max_examples=10)
@given(st.lists(calls, max_size=6))
def test_a_tenant_sees_its_own_runs_alone(keyed: Any, made: list[tuple[str, str, bool, bool]]) -> None:
    keyed.runtime.cache.forget(older_than=0)
    for number, (tenant, session, stored, stream) in enumerate(made):
        labels = {"x_agentspec_session": session} if session else {}
        store = "on" if stored else "off"
        ask(keyed.url, f"{tenant} {number}", tenant=tenant, stream=stream, x_agentspec_store=store, **labels)
    for tenant in TENANTS:
        mine = [
            (f"{tenant} {at}", session)
            for at, (whose, session, stored, _) in enumerate(made)
            if stored and whose == tenant
        ]
        runs = seen(keyed.url, tenant=tenant).json()["runs"]
        assert sum(run["calls"] for run in runs) == len(mine)
        found = []
        for run in runs:
            shown = seen(keyed.url, "run", tenant=tenant, name=run["id"]).json()
            found += [(call["answers"][0]["text"], shown["session"] or "") for call in shown["calls"]]
            assert [call["at"] for call in shown["calls"]] == sorted(call["at"] for call in shown["calls"])
            if shown["session"] is None:  # ids of the other tenant lead nowhere
                assert seen(keyed.url, "run", tenant=TENANTS[tenant == "alpha"], name=run["id"]).status_code == 400
        assert sorted(found) == sorted(mine)


def test_what_is_forgotten_is_gone_from_runs(gateway: Any, tmp_path: Path) -> None:
    running = gateway({"local": FakeBackend("ok")}, kept(path=tmp_path, refuse_patterns=("secret",)))
    for name in ("one", "two"):
        ask(running.url, f"hello {name}", x_agentspec_session=name)
    ask(running.url, "my secret", x_agentspec_session="three")
    assert {run["id"] for run in seen(running.url).json()["runs"]} == {"one", "two"}
    running.runtime.cache.forget(session="one")
    assert {run["id"] for run in seen(running.url).json()["runs"]} == {"two"}
    assert b"hello one" not in b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    running.runtime.cache.forget(text="hello two", decode=lambda ids: "")
    assert seen(running.url).json()["runs"] == []


def test_nothing_is_kept_unless_it_is_asked_for(gateway: Any) -> None:
    backend = FakeBackend("ok")
    running = gateway({"local": backend})
    ask(running.url)
    assert seen(running.url).status_code == 404 and not backend.requests[0].token_sources


CHUNKS = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in ("from ", "afar")]
COUNTS = {
    "usage": {"completion_tokens": 4},
    "metrics": {"speculative_decoding": {"num_draft_tokens": 5, "num_accepted_draft_tokens": 2}},
}
ENDED = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **COUNTS}
WHOLE = {"choices": [{"index": 0, "message": {"content": "from afar"}, "finish_reason": "stop"}], **COUNTS}


@pytest.mark.parametrize("stream", [False, True])
def test_an_upstreams_answer_is_kept_as_it_passes(gateway: Any, upstream: Any, open_page: Any, stream: bool) -> None:
    """With what vLLM counts for it, if it was started with --per-request-spec-decode-metrics."""

    def script(request: Any) -> None:
        if stream:
            events = [f"data: {json.dumps(one)}\n\n" for one in (*CHUNKS, ENDED)]
            request.head()
            request.send("".join([*events, "data: [DONE]\n\n"]).encode())
        else:
            request.answer(json.dumps(WHOLE).encode())

    running = gateway({"local": upstream(script).backend(server_kind="vllm")}, kept())
    ask(running.url, "hi", stream=stream)
    [run] = seen(running.url).json()["runs"]
    [call] = seen(running.url, "run", name=run["id"]).json()["calls"]
    assert [(one["text"], one["tokens"]) for one in call["answers"]] == [("from afar", [])]
    assert call["usage"]["completion_tokens"] == 4 and call["messages"][-1]["content"] == "hi"
    assert [call["speculation"][name] for name in ("drafted", "accepted", "steps")] == [5, 2, 2]
    page = open_page(f"{running.url}/ui#/runs/{run['id']}")
    page.get_by_text("40 % of drafts accepted").wait_for()
    assert page.get_by_text("It is not known where these tokens came from").count() == 1


def record(text: str, tokens: list[dict[str, Any]], at: float = 0.0, **more: Any) -> StoredResponse:
    answer = {"text": text, "finish_reason": "stop", "tokens": tokens}
    call = {
        "request_id": "r",
        "at": at,
        "seconds": 2.0,
        "first_token_seconds": 0.5,
        "workflow": "w",
        "step": "plan",
        "model": "m",
        "api": "/chat/completions",
        "usage": {"prompt_tokens": 9, "completion_tokens": len(tokens)},
        "answers": [answer],
        "decisions": [],
        **more,
    }
    return StoredResponse(
        f"run-{at}", "default", time.time() + at, "s", response=call, items=[{"role": "user", "content": text}]
    )


@pytest.fixture
def shown(gateway: Any, open_page: Any) -> Any:
    """A function that opens the run of these calls in a page."""

    def show(*calls: StoredResponse, **options: Any) -> Any:
        running = gateway({"local": FakeBackend("ok")}, kept())
        for call in calls:
            assert running.runtime.cache.runs.put(call)
        page = open_page(f"{running.url}/ui#/runs/s", **options)
        page.get_by_role("heading", name="Session s").wait_for()
        return page

    return show


SOURCES = ("session", "shared", "prediction", "grammar", "model", None)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;/script>\u202edesrever\u2066\x00\ufeff\u2028"


def token(text: str, at: int, **more: Any) -> dict[str, Any]:
    source = SOURCES[at % len(SOURCES)]
    return {"text": text, "forward": at, **({"source": source, "probability": 0.8} if source else {}), **more}


def test_hostile_text_stays_text(shown: Any) -> None:
    rejected = [{"text": HOSTILE, "source": "shared", "probability": 0.5}]
    tokens = [token(HOSTILE, at, rejected=rejected) for at in range(6)] + [token("x" * (1 << 20), 1)]
    text = "".join(one["text"] for one in tokens)
    tool = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
    page = shown(
        record(text, tokens, step=HOSTILE, model=HOSTILE, decisions=[{"event": HOSTILE, "at": 0.1, "x": HOSTILE}])
    )
    assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    shown = "(block) => [...block.waiting, ...[...block.children].flatMap((span) => span.run.tokens)]"
    answer = page.get_by_role("group", name="Answer", exact=True)
    got = answer.evaluate(f"one => [...one.children].flatMap({shown}).map((token) => token.text).join('')")
    assert got == text
    assert tool and page.evaluate("document.documentElement.scrollWidth") <= 1280
    page.get_by_role("button", name="1 rejected draft").first.click()
    assert HOSTILE.replace("\x00", "") in page.locator(".rejected s").first.text_content().replace("\x00", "")


@pytest.mark.parametrize("run", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_of_a_long_answer_only_what_is_near_the_screen_has_elements(shown: Any, run: int) -> None:
    """10,000 tokens: elements are counted rather than milliseconds, which a busy machine stretches."""
    texts = [f"word{at}{chr(10) if at % 20 == 0 else ' '}" for at in range(10_000)]
    more = {"rejected": [{"text": "no", "source": "shared", "probability": 0.1}]} if run == 1 else {}
    tokens = [token(text, at // run, **more) for at, text in enumerate(texts)]
    page = shown(record("".join(texts), tokens))
    answer = page.get_by_role("group", name="Answer", exact=True)
    elements = "one => [one.querySelectorAll('*').length, one.children.length]"
    count, blocks = answer.evaluate(elements)
    assert count < 1500 and 60 < blocks < 120
    for at in (0, blocks // 2, blocks - 1):
        block = answer.locator(".block").nth(at)
        block.evaluate("one => one.scrollIntoView()")
        block.locator(".token").first.wait_for()
    assert answer.evaluate(elements)[0] < 4000, "what was passed over is plain text"
    assert answer.evaluate("one => one.textContent") == "".join(texts)


@pytest.mark.parametrize("width", [320, pytest.param(1280, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_fits_and_can_be_read_by_all(shown: Any, violations: Any, width: int, dark: bool) -> None:
    speculation = {
        "drafted": 9,
        "accepted": 6,
        "steps": 4,
        "estimated_seconds_saved": 0.5,
        "strategy": "x",
        "seconds": {"search": 0.3},
    }
    rejected = [{"text": "no", "source": "shared", "probability": 0.4}]
    tokens = [token(f"word{at} ", at, **({"rejected": rejected} if at % 9 == 0 else {})) for at in range(60)]
    decided = [{"event": "scored", "at": 0.4, "value": 7.0, "accepted": True, "reason": "good"}]
    calls = [
        record("".join(one["text"] for one in tokens), tokens, at, speculation=speculation, decisions=decided)
        for at in (0.0, 5.0)
    ]
    page = shown(*calls, width=width, dark=dark)
    for summary in page.locator("summary").all():
        summary.press("Enter")
    page.get_by_role("button", name="1 rejected draft").first.press("Enter")
    assert page.locator(".rejected").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []


def test_what_a_strategy_decided_is_shown_step_by_step(gateway: Any, open_page: Any) -> None:
    """SpecReason itself, over models that reason in the same way each time."""

    def steps(second: str) -> ThinkingModel:
        said = ["One.\n\n", second, "It is \\boxed{4}.\n\n"]
        score = {"Too.": "2"}
        return ThinkingModel(lambda before: said[before.count("\n\n")], score=lambda step: score.get(step, "9"))

    settings = Settings(
        backends={name: TorchSettings(model=name) for name in ("large", "small")},
        models={"local": SpecReasonSettings(base="large", small="small")},
        cache=CacheSettings(runs_bytes=1 << 20),
    )
    running = gateway({"large": steps("Two.\n\n"), "small": steps("Too.\n\n")}, settings)
    ask(running.url, x_agentspec_session="s")
    page = open_page(f"{running.url}/ui#/runs/s")
    rows = page.get_by_role("table", name="Decisions of the strategy").get_by_role("row")
    rows.last.wait_for()
    shown = [[cell.inner_text().strip() for cell in row.get_by_role("cell").all()[1:]] for row in rows.all()[1:]]
    assert shown == [
        ["accepted", "small model", "9.0", "One."],
        ["rewritten", "base model", "2.0", "Too.\nTwo."],
        ["accepted", "small model", "9.0", "It is \\boxed{4}."],
        ["ended", "", "", 'reason: "answered"'],
    ]


def test_one_file_shows_the_same_without_a_server(shown: Any, open_page: Any, tmp_path: Path) -> None:
    tokens = [token(HOSTILE, at) for at in range(6)]
    call = record("".join(one["text"] for one in tokens), tokens)
    with SuffixCache.open(tmp_path / "cache", runs_bytes=1 << 20) as cache:
        assert cache.runs.put(call)
    file, options = tmp_path / "run.html", ("--path", str(tmp_path / "cache"))

    def program(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, [*arguments, *options])

    assert program("trace", "show").output.split()[-1] == "s"
    assert json.loads(program("trace", "show", "s").output)["calls"][0]["answers"][0]["tokens"] == tokens
    assert program("trace", "show", "s", "--html", str(file)).exit_code == 0
    assert program("trace", "show", "t").exit_code == 1
    views = [open_page(file.as_uri()), shown(call)]
    for page in views:
        page.get_by_role("heading", name="Session s").wait_for()
    alone, served = (page.locator("article").evaluate("one => one.innerText") for page in views)
    assert alone == served and "alert" in alone
    assert "http" not in views[0].evaluate("performance.getEntriesByType('resource').map((one) => one.name).join()")
