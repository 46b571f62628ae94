"""Servers that are listed, and those that come and go by DNS."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentspec.backends.pool.fleet import Fleet
from agentspec.backends.pool.servers import Servers, listed
from agentspec.backends.settings import FleetSettings, OpenAISettings, PoolSpec, PoolTarget


def settings(**given: Any) -> OpenAISettings:
    return OpenAISettings(**given)


def named(addresses: Any) -> list[str]:
    return [one.name for one in addresses]


def test_listed_servers_are_named_by_host_and_port_and_by_path_if_need_be() -> None:
    urls = settings(
        base_urls=["http://a/v1", "https://b/v1", "http://c:1/x/v1", "http://c:1/y/v1", "http://[::1]:2/v1"]
    )
    expected = ["a:80", "b:443", "c:1/x/v1", "c:1/y/v1", "[::1]:2"]
    assert named(listed(urls.base_urls or ())) == expected


def test_servers_that_differ_by_their_scheme_alone_are_two() -> None:
    urls = ["http://a:1/v1", "https://a:1/v1", "http://a:1/x", "https://b:1/v1", "http://b:2/v1"]
    expected = ["http://a:1/v1", "https://a:1/v1", "a:1/x", "b:1", "b:2"]
    assert named(listed(settings(base_urls=urls).base_urls or ())) == expected
    servers = Servers("s", settings(base_urls=urls), FleetSettings())
    assert [one.name for one in servers.members] == [f"s/{name}" for name in expected]
    assert [str(one.backend.settings.url) for one in servers.members] == urls


@pytest.mark.parametrize("same", [("http://me@a/v1", "http://you@a/v1"), ("http://a/v1", "http://A:80/v1/")])
def test_one_server_is_no_two_for_a_user_or_a_slash_at_the_end(same: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="names a:80/v1 twice"):
        settings(base_urls=same)


@pytest.mark.parametrize("wrong", ["http://a/v1 # gpu 1", "http://a/v1?key=1", "http://a/v1#1"])
def test_roots_of_servers_are_refused_that_paths_cannot_be_added_to(wrong: str) -> None:
    with pytest.raises(ValueError, match="without blanks"):
        settings(base_urls=["http://b/v1", wrong])


def resolving(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], list[str]]) -> None:
    def getaddrinfo(host: str, port: int, *arguments: Any, **options: Any) -> list[Any]:
        assert host == "vllm.test"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer()]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_each_address_of_a_name_is_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str]] = [["10.0.0.2", "10.0.0.1", "10.0.0.1"], ["10.0.0.2", "10.0.0.3"], []]
    resolving(monkeypatch, lambda: answers.pop(0))

    async def work() -> None:
        servers = Servers("a", settings(base_url="http://vllm.test:8000/v1", resolve="a"), FleetSettings())
        lost: list[str] = []
        servers.lost.append(lost.append)
        await servers.refresh(0.0)
        assert named(servers.members) == ["a/10.0.0.1:8000", "a/10.0.0.2:8000"]
        kept = servers.members[1]
        await servers.refresh(5.0)
        assert named(servers.members) == ["a/10.0.0.2:8000", "a/10.0.0.3:8000"] and servers.members[0] is kept
        assert lost == ["a/10.0.0.1:8000"]
        await servers.refresh(10.0)  # a name without addresses is no reason to lose all servers
        assert len(servers.members) == 2
        endpoint = kept.backend.endpoint
        assert endpoint.name == "'a'" and "10.0.0" not in repr(endpoint)  # errors for clients name the backend
        await servers.aclose()

    asyncio.run(work())


def test_all_calls_that_come_before_the_servers_are_known_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup is one, and goes on if the call goes away that it began with."""
    lookups, over = [], threading.Event()

    def answer() -> list[str]:
        lookups.append(1)
        assert over.wait(60)
        return ["10.0.0.1"]

    resolving(monkeypatch, answer)
    own = settings(base_url="http://vllm.test:8000/v1", resolve="a", probe=False)
    made = Fleet({"a": PoolSpec("a", (PoolTarget("a", None),), "round_robin")}, {"a": own}, {}, FleetSettings())

    async def call() -> list[str]:
        await made.pools["a"].prepare()
        return [member.name for member, _ in made.pools["a"].members()]

    async def work() -> None:
        calls = [asyncio.create_task(call()) for _ in range(3)]
        while not lookups:
            await asyncio.sleep(0)
        calls[0].cancel()
        late = asyncio.create_task(call())
        await asyncio.sleep(0)
        over.set()
        assert await asyncio.gather(*calls[1:], late) == [["a/10.0.0.1:8000"]] * 3 and len(lookups) == 1
        await made.aclose()

    asyncio.run(work())


def test_a_lookup_that_hangs_holds_up_nothing_and_the_next_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, over = [], threading.Event()

    def answer() -> list[str]:
        lookups.append(threading.current_thread())
        assert len(lookups) > 1 or over.wait(60)
        return ["10.0.0.1"]

    resolving(monkeypatch, answer)
    monkeypatch.setattr("agentspec.backends.pool.servers.LOOKUP_SECONDS", 0.001)
    servers = Servers("a", settings(base_url="http://vllm.test:8000/v1", resolve="a"), FleetSettings())

    async def work() -> None:
        while not lookups:
            await servers.refresh(0.0)
        assert servers.members == () and lookups[0].daemon
        monkeypatch.setattr("agentspec.backends.pool.servers.LOOKUP_SECONDS", 60.0)
        await servers.refresh(5.0)
        assert named(servers.members) == ["a/10.0.0.1:8000"]
        over.set()
        await servers.aclose()

    asyncio.run(work())


def test_a_lookup_that_fails_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    resolving(monkeypatch, failing)
    servers = Servers("a", settings(base_url="http://vllm.test/v1", resolve="a"), FleetSettings())
    for now in range(3):
        asyncio.run(servers.refresh(float(now)))
    assert servers.members == () and [record.levelname for record in caplog.records] == ["WARNING"]
