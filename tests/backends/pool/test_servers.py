"""Servers that are listed, and those that come and go by DNS."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings

Resolve = Callable[[Callable[[], list[str]]], None]


def made(**backend: Any) -> Any:
    """The fleet of a runtime with one backend of these settings."""
    settings = OpenAISettings(**{"probe": False, **backend})
    runtime = Runtime(Settings(backends={"a": settings}, models={"m": ModelSettings(backend="a")}))  # type: ignore[arg-type]
    runtime.start()
    return runtime.fleet


def names(fleet: Any) -> list[str]:
    return [sample.member.removeprefix("a/") for sample in fleet.samples()]


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        (["http://a/v1", "https://b/v1", "http://[::1]:2/v1"], ["a:80", "b:443", "[::1]:2"]),
        (["http://c:1/x/v1", "http://c:1/y/v1"], ["http://c:1/x/v1", "http://c:1/y/v1"]),
        (["http://a:1/v1", "https://a:1/v1", "http://b:1/v1"], ["http://a:1/v1", "https://a:1/v1", "b:1"]),
    ],
)
def test_listed_servers_are_named_by_host_and_port_or_by_their_url(urls: list[str], expected: list[str]) -> None:
    fleet = made(base_urls=urls)
    assert names(fleet) == expected
    assert [str(member.backend.settings.url) for member in fleet.servers["a"].members] == urls


@pytest.mark.parametrize("same", [("http://me@a/v1", "http://you@a/v1"), ("http://a/v1", "http://A:80/v1/")])
def test_a_server_listed_twice_is_refused(same: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="names a:80/v1 twice"):
        made(base_urls=same)


@pytest.mark.parametrize("wrong", ["http://a/v1 # gpu 1", "http://a/v1?key=1", "http://a/v1#1"])
def test_roots_that_paths_cannot_be_added_to_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="without blanks"):
        made(base_urls=["http://b/v1", wrong])


@pytest.fixture
def resolving(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Sets the answers of the resolver, which is the system's."""

    def resolve(answer: Callable[[], list[str]]) -> None:
        def getaddrinfo(host: str, port: int, *arguments: Any, **options: Any) -> list[Any]:
            assert host == "vllm.test"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer()]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return resolve


BY_NAME = {"base_url": "http://vllm.test:8000/v1", "resolve": "a"}


def test_each_address_of_a_name_is_a_server_of_its_own(resolving: Resolve) -> None:
    answers: list[list[str]] = [["10.0.0.2", "10.0.0.1", "10.0.0.1"], ["10.0.0.2", "10.0.0.3"], []]
    resolving(lambda: answers.pop(0))

    async def work() -> None:
        fleet = made(**BY_NAME)
        servers = fleet.servers["a"]
        lost: list[str] = []
        servers.lost.append(lost.append)
        await fleet.begin()
        assert names(fleet) == ["10.0.0.1:8000", "10.0.0.2:8000"]
        staying = servers.members[1]
        await servers.refresh()
        assert names(fleet) == ["10.0.0.2:8000", "10.0.0.3:8000"] and servers.members[0] is staying
        assert lost == ["a/10.0.0.1:8000"]
        await servers.refresh()  # a name without addresses is no reason to lose all servers
        assert len(servers.members) == 2
        endpoint = staying.backend.endpoint
        assert endpoint.name == "'a'" and "10.0.0" not in repr(endpoint)  # errors for clients name the backend
        await fleet.aclose()

    asyncio.run(work())


def test_all_calls_that_come_before_the_servers_are_known_wait_for_them(resolving: Resolve) -> None:
    """The lookup is one, and goes on if the call is cancelled that it began with."""
    lookups, over = [], threading.Event()

    def answer() -> list[str]:
        lookups.append(1)
        assert over.wait(60)
        return ["10.0.0.1"]

    resolving(answer)

    async def work() -> None:
        fleet = made(**BY_NAME)
        calls = [asyncio.create_task(fleet.begin()) for _ in range(3)]
        while not lookups:
            await asyncio.sleep(0)
        calls[0].cancel()
        calls.append(asyncio.create_task(fleet.begin()))
        await asyncio.sleep(0)
        over.set()
        await asyncio.gather(*calls[1:])
        assert names(fleet) == ["10.0.0.1:8000"] and len(lookups) == 1
        await fleet.aclose()

    asyncio.run(work())


def test_a_lookup_that_hangs_blocks_nothing_and_the_next_one_counts(resolving: Resolve, in_virtual_time: Any) -> None:
    lookups, over = [], threading.Event()

    def answer() -> list[str]:
        lookups.append(threading.current_thread())
        assert len(lookups) > 1 or over.wait(60)
        return ["10.0.0.1"]

    resolving(answer)
    fleet = made(**BY_NAME)
    servers = fleet.servers["a"]
    while not lookups:
        in_virtual_time(servers.refresh())
    assert names(fleet) == [] and lookups[0].daemon
    asyncio.run(servers.refresh())
    assert names(fleet) == ["10.0.0.1:8000"]
    over.set()
