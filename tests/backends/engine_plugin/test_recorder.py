"""A cache that hangs, seen from a server: neither its steps nor its end nor its memory depend on it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from agentspec.backends.engine_plugin import rounds
from agentspec.backends.engine_plugin.drafter import ServerDrafter
from agentspec.backends.engine_plugin.request_state import RequestState
from agentspec.backends.engine_plugin.rounds import FailureLog
from agentspec.cache import CacheRequest
from agentspec.cache.tokens import Tokens
from tests.backends.vllm.conftest import TEXT, VOCABULARY, Client

RECORDER = "agentspec.backends.engine_plugin.recorder"


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"agentspec_drafter_{name}", labels) or 0.0


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    release = threading.Event()
    yield release
    release.set()


def test_a_recorder_that_hangs_bounds_what_waits_and_the_end(
    hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(state: RequestState, prompt: Tokens) -> CacheRequest:
        hung.wait()
        raise AssertionError

    monkeypatch.setattr(f"{RECORDER}.CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(f"{RECORDER}.WAITING_TOKENS", 1000)
    closed: list[bool] = []
    drafter = ServerDrafter(never, VOCABULARY, on_close=closed.append)
    dropped, most = counted("dropped_requests_total"), 0.0
    for _ in range(50):
        clients = [Client(drafter, TEXT) for _ in range(4)]
        for at in range(0, 30, 3):
            assert not any(tree.tokens for tree in drafter.propose([one.turn(TEXT[at : at + 3], 4) for one in clients]))
        for client in clients:
            drafter.end(client.state)
        most = max(most, counted("queued_tokens"))
    assert most <= 1000 + 30 * 1000 / len(TEXT), "a request's output is at most as long as it is"
    assert counted("dropped_requests_total") - dropped >= 180
    for _ in range(2):
        drafter.close()
    assert closed == [True] * 2 and not drafter.flush(0.01)


PROGRAM = """
import threading
from types import SimpleNamespace
from agentspec.backends.engine_plugin import cache_router, recorder
from agentspec.backends.engine_plugin.settings import read_settings
from agentspec.backends.engine_plugin.drafter import ServerDrafter
from agentspec.backends.engine_plugin.request_state import RequestInfo
from agentspec.cache.sync import StoreSync
import numpy as np

hangs = threading.Event()
StoreSync.follow = StoreSync.load = lambda *_: (hangs.set(), threading.Event().wait())  # the database does not answer
recorder.CLOSE_SECONDS = 0.5
model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=dict), tokenizer=".", tokenizer_revision=None)
router = cache_router.open_router(read_settings("VLLM"), model, "here")
drafter = ServerDrafter(router.open, 1000, on_close=router.close)
cache_router.close_at_exit(drafter.close)
drafter.begin_state(np.arange(9, dtype=np.int32), RequestInfo())
hangs.wait()
print("ends")
"""


def test_a_server_ends_though_its_cache_hangs(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSPEC_CACHE_PATH", f"{tmp_path}/cache")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
    assert "not recorded within" in done.stderr


def test_failures_are_counted_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(rounds, "monotonic", lambda: now[0])
    log, before = (
        FailureLog(rounds.logging.getLogger("agentspec.x"), "a cost"),
        counted("failures_total", cost="a cost"),
    )
    for step in range(1200):
        now[0] = step / 10
        log.report(ValueError("a secret"))
    assert counted("failures_total", cost="a cost") == before + 1200
    said = [record.getMessage() for record in caplog.records]
    assert [line[: line.index("):")] for line in said] == [f"agentspec: a cost (failure {n}" for n in (1, 601)]
