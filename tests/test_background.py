from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any, cast

import anyio
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.background import call_sync, iterate_async, iterate_sync, remote_runtime
from agentspec.types import GenerateRequest

pytestmark = pytest.mark.anyio


def ask(model: str) -> GenerateRequest:
    return GenerateRequest(model=model, text="hello")


def upstream(**settings: Any) -> OpenAISettings:
    return OpenAISettings(base_url=cast(Any, "http://127.0.0.1:9/v1"), **settings)


async def counted(stop: int, closed: list[str], latency: float = 0.0) -> AsyncIterator[int]:
    try:
        with anyio.CancelScope():  # a scope across yields: only a single task may run this
            for number in range(stop):
                await anyio.sleep(latency)
                yield number
    finally:
        closed.append(threading.current_thread().name)


def test_closing_iterate_sync_cancels_at_once() -> None:
    closed: list[str] = []
    with closing(cast(Any, iterate_sync(lambda: counted(100_000, closed, 0.01)))) as numbers:
        assert next(numbers) == 0
    assert closed == ["agentspec"]


def test_iterate_async_serves_loops_that_come_and_go() -> None:
    closed: list[str] = []

    async def consume() -> list[int]:
        return [number async for number in iterate_async(lambda: counted(2, closed))]

    assert asyncio.run(consume()) == asyncio.run(consume()) == [0, 1]
    assert closed == ["agentspec", "agentspec"]


async def test_cancelled_iterate_async_cancels_the_work() -> None:
    closed: list[str] = []
    with anyio.CancelScope() as scope:
        async for _ in iterate_async(lambda: counted(100_000, closed, 0.01)):
            scope.cancel()
    assert scope.cancelled_caught and closed == ["agentspec"]


def test_the_shared_runtime_takes_any_local_model_where_nothing_is_configured() -> None:
    program = """
from agentspec.background import shared_runtime
default, other = shared_runtime(), shared_runtime("./my-model")
assert shared_runtime("smollm2-135m") is default and shared_runtime("./my-model") is other is not default
assert other.models() == ["./my-model"] and other.cache is default.cache
print("ends")
"""
    assert run(program) == "ends\n"
    configured = "from agentspec.background import shared_runtime as of\nprint(of('./my-model') is of())"
    assert run(configured, AGENTSPEC_BACKENDS__LOCAL__DEVICE="cpu") == "True\n"


def test_equal_endpoints_share_connections_and_errors_name_no_password() -> None:
    first, other = (upstream(read_timeout=seconds) for seconds in (600.0, 1.0))
    assert remote_runtime(first) is remote_runtime(upstream()) is not remote_runtime(other)
    settings = OpenAISettings.model_validate({"base_url": "http://me:secret@127.0.0.1:9/v1"})
    assert remote_runtime(settings).settings.backends == {"http://127.0.0.1:9/v1": settings}


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_has_a_loop_of_its_own() -> None:
    assert call_sync(anyio.sleep, 0) is None
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it, should it wait for a thread that was not copied
        os._exit(list(iterate_sync(lambda: counted(3, []))) != [0, 1, 2])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_program_ends_while_an_answer_is_half_read() -> None:
    program = """
from agentspec.background import iterate_sync
from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest
fake = FakeBackend(Answer(text="one two three", latency=0.05))
answer = iterate_sync(lambda: fake.generate(GenerateRequest(model="m", text="x")))
print(next(answer).text)
"""
    assert run(program) == "one\n"


def run(program: str, **variables: str) -> str:
    """What a program prints, which ends without a word of trouble."""
    command, environment = [sys.executable, "-c", program], os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
