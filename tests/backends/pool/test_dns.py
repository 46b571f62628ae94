"""Servers found by DNS, whose answers come from a name server of the tests' own, over UDP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.resolver
import dns.rrset
import pytest

from agentspec.backends.pool import servers as discovery
from agentspec.backends.pool.servers import Servers
from agentspec.backends.pool.settings import FleetSettings
from agentspec.backends.settings import OpenAISettings

INTERVAL = 5.0


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records`, by (name, kind): texts of records, or an rcode; None says nothing at all."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str] | dns.rcode.Rcode | None] = {}
        self.ttl = 3
        self.asked: list[tuple[str, str]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        [question] = query.question
        key = question.name.to_text().lower(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append(key)
        found = self.records.get(key, dns.rcode.NXDOMAIN if not self._knows(key[0]) else [])
        if found is None:
            return
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        if isinstance(found, list):
            if found:
                answer.answer.append(dns.rrset.from_text(question.name, self.ttl, "IN", key[1], *found))
        else:
            answer.set_rcode(found)
        self.transport.sendto(answer.to_wire(), addr)

    def _knows(self, name: str) -> bool:
        return any(name == known for known, _ in self.records)


@pytest.fixture
def by_dns(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs `work` with a name server that the resolvers of this process ask, and the servers found by it."""
    for name in ("getaddrinfo", "getnameinfo", "getfqdn", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, getattr(socket, name))  # put back what the override replaces

    def run(work: Callable[[NameServer, Servers], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            server = NameServer()
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: server, local_addr=("127.0.0.1", 0)
            )
            port = transport.get_extra_info("sockname")[1]
            one = dns.resolver.Resolver(configure=False)
            one.port, one.nameservers, one.timeout, one.lifetime = port, ["127.0.0.1"], 0.2, 0.3
            dns.resolver.override_system_resolver(one)
            own = OpenAISettings(base_url="http://vllm.test:8000/v1", resolve="a")  # type: ignore[arg-type]
            servers = Servers("a", own, FleetSettings())
            try:
                await work(server, servers)
            finally:
                await servers.aclose()
                transport.close()

        asyncio.run(main())

    return run


def names(servers: Servers) -> list[str]:
    return [member.name.removeprefix("a/") for member in servers.members]


FAILURES = pytest.mark.parametrize(
    "answer",
    [dns.rcode.NXDOMAIN, dns.rcode.SERVFAIL, [], None],
    ids=["no such name", "the name server fails", "no address", "silence"],
)


@FAILURES
def test_members_stay_while_a_name_cannot_be_looked_up_and_change_once_it_can(
    by_dns: Any, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    key, records = ("vllm.test.", "A"), ["10.0.0.1", "10.0.0.2"]

    async def work(server: NameServer, servers: Servers) -> None:
        server.records[key] = records
        await servers.refresh(0.0)
        before, lost = servers.members, list[str]()
        servers.lost.append(lost.append)
        assert len(before) == 2 and not caplog.records
        server.records[key] = answer
        for now in (5.0, 10.0):
            await servers.refresh(now)
            assert servers.members == before and not lost
            assert servers.look_at == now + INTERVAL
        [warning] = [one for one in caplog.records if one.levelname == "WARNING"]  # once, whatever repeats
        assert "cannot be found out" in warning.getMessage()
        server.records[key] = records[1:]
        await servers.refresh(15.0)
        assert list(servers.members) == [before[1]] and lost == [before[0].name]

    by_dns(work)


def test_each_address_is_a_server_with_the_port_of_the_url(by_dns: Any) -> None:
    async def work(server: NameServer, servers: Servers) -> None:
        server.records = {
            ("vllm.test.", "A"): ["10.0.0.2", "10.0.0.1"],
            ("vllm.test.", "AAAA"): ["fd00::1"],
        }
        await servers.refresh(0.0)
        assert names(servers) == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
        assert {kind for _, kind in server.asked} == {"A", "AAAA"}
        first = servers.members
        server.records["vllm.test.", "A"] = ["10.0.0.3", "10.0.0.1"]  # in any order
        await servers.refresh(INTERVAL)
        assert names(servers) == ["10.0.0.1:8000", "10.0.0.3:8000", "[fd00::1]:8000"]
        assert servers.members[0] is first[0] and servers.members[2] is first[2]

    by_dns(work)


def test_what_a_late_answer_says_counts_at_the_next_look(by_dns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: NameServer, servers: Servers) -> None:
        monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 0.01)
        server.records["vllm.test.", "A"] = None
        await servers.refresh(0.0)
        assert servers.looked and not servers.members
        server.records["vllm.test.", "A"] = ["10.0.0.1"]  # the resolver asks again by itself
        monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 60.0)
        while not servers.members:
            await servers.refresh(INTERVAL)
        assert names(servers) == ["10.0.0.1:8000"]

    by_dns(work)
