"""Servers found by DNS, whose answers come from a name server of the tests' own, over UDP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.resolver
import dns.rrset
import pytest

from agentspec.backends.pool import discovery
from agentspec.backends.pool.servers import Servers
from agentspec.backends.pool.settings import FleetSettings
from agentspec.backends.settings import OpenAISettings
from agentspec.placement.hash_ring import POINTS, HashRing

SERVICE = "_http._tcp.vllm.test."
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

    def run(work: Callable[[NameServer, Servers], Coroutine[Any, Any, None]], resolve: str, host: str) -> None:
        async def main() -> None:
            server = NameServer()
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: server, local_addr=("127.0.0.1", 0)
            )
            port = transport.get_extra_info("sockname")[1]
            for one in (dns.resolver.Resolver(configure=False), dns.asyncresolver.Resolver(configure=False)):
                one.port, one.nameservers, one.timeout, one.lifetime = port, ["127.0.0.1"], 0.2, 0.3
                one.search = [dns.name.from_text("cluster.test.")]
                if isinstance(one, dns.asyncresolver.Resolver):
                    monkeypatch.setattr(dns.asyncresolver, "default_resolver", one)
                else:
                    dns.resolver.override_system_resolver(one)
            own = OpenAISettings(base_url=f"http://{host}/v1", resolve=resolve)  # type: ignore[arg-type]
            servers = Servers("a", own, FleetSettings(discovery_interval=INTERVAL))
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
@pytest.mark.parametrize(
    ("resolve", "host", "key", "records"),
    [
        ("a", "vllm.test:8000", ("vllm.test.", "A"), ["10.0.0.1", "10.0.0.2"]),
        ("srv", SERVICE, (SERVICE, "SRV"), ["0 1 8001 n1.test.", "0 1 8002 n2.test."]),
    ],
    ids=["A", "SRV"],
)
def test_members_stay_while_a_name_cannot_be_looked_up_and_change_once_it_can(
    by_dns: Any,
    caplog: pytest.LogCaptureFixture,
    resolve: str,
    host: str,
    key: tuple[str, str],
    records: list[str],
    answer: Any,
) -> None:
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

    by_dns(work, resolve, host)


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

    by_dns(work, "a", "vllm.test:8000")


def test_a_service_tells_ports_weights_and_priorities(by_dns: Any) -> None:
    async def work(server: NameServer, servers: Servers) -> None:
        server.records[SERVICE, "SRV"] = ["5 1 9 spare.test.", "0 30 8001 N1.test.", "0 10 8002 n2.test."]
        await servers.refresh(0.0)
        assert [(one.name, one.weight) for one in servers.members] == [("a/n1.test:8001", 1.5), ("a/n2.test:8002", 0.5)]
        assert [str(one.backend.settings.url) for one in servers.members] == [
            "http://n1.test:8001/v1",
            "http://n2.test:8002/v1",
        ]
        first = servers.members
        server.records[SERVICE, "SRV"] = ["0 7 8001 n1.TEST.", "0 7 8002 n2.test.", "0 7 8003 n2.test."]
        await servers.refresh(3.0)
        assert names(servers) == ["n1.test:8001", "n2.test:8002", "n2.test:8003"] and servers.members[:2] == first
        assert {one.seen().weight for one in servers.members} == {1.0}
        server.records[SERVICE, "SRV"] = ["5 1 9 spare.test."]  # all better ones are gone
        await servers.refresh(6.0)
        assert names(servers) == ["spare.test:9"]

    by_dns(work, "srv", SERVICE)


@pytest.mark.parametrize(("ttl", "looks"), [(0, 1.0), (3, 3.0), (3600, INTERVAL)])
def test_a_service_is_looked_up_when_its_time_is_over(by_dns: Any, ttl: int, looks: float) -> None:
    async def work(server: NameServer, servers: Servers) -> None:
        server.ttl, server.records[SERVICE, "SRV"] = ttl, ["0 1 8001 n1.test."]
        await servers.refresh(100.0)
        assert not servers.is_due(100.0 + looks - 0.01) and servers.is_due(100.0 + looks)

    by_dns(work, "srv", SERVICE)


def test_a_short_name_is_looked_for_in_the_search_domains(by_dns: Any) -> None:
    """As Kubernetes' `_http._tcp.vllm.default.svc` has to be."""

    async def work(server: NameServer, servers: Servers) -> None:
        server.records["_http._tcp.vllm.default.svc.cluster.test.", "SRV"] = ["0 1 8001 n1.test."]
        await servers.refresh(0.0)
        assert names(servers) == ["n1.test:8001"]

    by_dns(work, "srv", "_http._tcp.vllm.default.svc")


@pytest.mark.parametrize("weights", [(0, 0, 0), (65535, 1, 0), (33, 33, 33)])
def test_weights_of_a_service_are_relative_and_make_no_large_ring(by_dns: Any, weights: tuple[int, ...]) -> None:
    async def work(server: NameServer, servers: Servers) -> None:
        server.records[SERVICE, "SRV"] = [f"0 {weight} 80 n{number}.test." for number, weight in enumerate(weights)]
        await servers.refresh(0.0)
        found = {one.name: one.weight for one in servers.members}
        assert len(found) == 3 and min(found.values()) > 0 and sum(found.values()) == pytest.approx(3)
        assert len(HashRing(found)._points) <= POINTS * 3 + 3

    by_dns(work, "srv", SERVICE)


@pytest.mark.parametrize("target", [".", r"a\032b.test.", r"a\047b.test."])
def test_a_service_that_names_no_host_changes_nothing(
    by_dns: Any, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    """A target of "." says that there is no such service (RFC 2782)."""

    async def work(server: NameServer, servers: Servers) -> None:
        server.records[SERVICE, "SRV"] = ["0 1 8001 n1.test."]
        await servers.refresh(0.0)
        server.records[SERVICE, "SRV"] = [f"0 1 8001 {target}"]
        await servers.refresh(INTERVAL)
        assert names(servers) == ["n1.test:8001"] and servers.looked
        assert [one.levelname for one in caplog.records] == ["WARNING"]

    by_dns(work, "srv", SERVICE)


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

    by_dns(work, "a", "vllm.test:8000")
