"""The servers of one `[backends.NAME]` table: a list, or the addresses of a name, which come and go."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import HttpUrl

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.member import PoolMember, current_time
from agentspec.backends.settings import FleetSettings, OpenAISettings

if TYPE_CHECKING:
    from agentspec.backends.openai.isolation import TenantIsolation

logger = logging.getLogger(__name__)

LOOKUP_SECONDS = 5.0
DISCOVERY_SECONDS = 5.0  # between two lookups of a name


class DiscoveryError(Exception):
    """The servers could not be found out now. The message is for operators."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server: the root of its API, and the address to `connect` to if the root's host has several."""

    name: str
    url: HttpUrl
    connect: str | None = None


def listed(urls: Iterable[HttpUrl]) -> tuple[Address, ...]:
    """The servers at `urls`, named by host and port, or by the whole URL where these are not enough."""
    named = [(f"{_shown(url.host or '')}:{url.port}", url) for url in urls]
    names = [name for name, _ in named]
    return tuple(
        Address(name if names.count(name) == 1 else f"{url.scheme}://{name}{url.path}", url) for name, url in named
    )


async def discover(settings: OpenAISettings) -> tuple[Address, ...]:
    """Look now. Raises `DiscoveryError` if nothing could be found: the earlier result then holds."""
    if settings.base_urls is not None:
        return listed(settings.base_urls)
    host, port = settings.url.host or "", settings.url.port or 443
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            found = await asyncio.wrap_future(_lookup(host, port))
    except TimeoutError:
        raise DiscoveryError(f"no answer within {LOOKUP_SECONDS:g} s") from None
    except (OSError, UnicodeError) as error:
        raise DiscoveryError(str(error)) from None
    if not found:
        raise DiscoveryError(f"{host} has no address")
    return tuple(Address(f"{_shown(address)}:{port}", settings.url, address) for address in found)


def _lookup(host: str, port: int) -> Future[list[str]]:
    """The addresses of a host, sorted, found in a thread of its own: the resolver cannot be stopped, takes long
    where DNS does not answer, and must block no other work, the end of the process included.
    """
    answer: Future[list[str]] = Future()
    answer.set_running_or_notify_cancel()  # the caller may stop waiting for it; it goes on

    def look() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.set_result(sorted({str(one[4][0]) for one in found}))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=look, name="agentspec-lookup", daemon=True).start()
    return answer


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class Servers:
    """The members of the pools that the backend `name` is a part of. One server is the same member in all of them.

    `only` is the backend of a table with one address, if it is built already. `lost` holds functions that are called
    with the name of a member that is gone, or has failed so that its caches probably are.
    """

    def __init__(
        self, name: str, settings: OpenAISettings, fleet: FleetSettings, only: OpenAIBackend | None = None
    ) -> None:
        self.name, self.settings, self._fleet = name, settings, fleet
        self.members: tuple[PoolMember, ...] = ()
        self.lost: list[Callable[[str], None]] = []
        self.look_at = 0.0  # when to look for servers the next time
        self.looked = False  # at least once, to the end
        self._isolation: TenantIsolation | None = None
        self._most_tokens: int | None = None
        self._complaint = ""
        if not settings.has_several_servers:
            backend = only or OpenAIBackend(settings, name=name)
            self.members = (PoolMember(name, name, backend, fleet, self._tell_lost),)
        elif settings.base_urls is not None:
            self.members = tuple(self._member(self._named(one), one) for one in listed(settings.base_urls))

    @property
    def is_dynamic(self) -> bool:
        """Whether servers come and go."""
        return self.settings.resolve != "off"

    def is_due(self) -> bool:
        """Whether to look for servers now."""
        return self.is_dynamic and current_time() >= self.look_at

    async def refresh(self) -> None:
        """Look which servers there are now. Those known before stay if that cannot be found out."""
        self.look_at = current_time() + DISCOVERY_SECONDS
        try:
            wanted = {self._named(address): address for address in await discover(self.settings)}
        except DiscoveryError as error:
            if str(error) != self._complaint:
                logger.warning("backends.%s: its servers cannot be found out: %s", self.name, error)
            self._complaint = str(error)
        else:
            self._complaint = ""
            await self._update(wanted)
        self.looked = True

    async def _update(self, wanted: dict[str, Address]) -> None:
        known = {member.name: member for member in self.members}
        self.members = tuple(known.get(name) or self._member(name, address) for name, address in wanted.items())
        gone = [member for name, member in known.items() if name not in wanted]
        if gone or len(wanted) > len(known):
            logger.info("backends.%s: %d servers, %d left", self.name, len(wanted), len(gone))
        for member in gone:
            self._tell_lost(member.name)
            await member.backend.aclose()  # its running calls go on to their ends

    def _named(self, address: Address) -> str:
        return f"{self.name}/{address.name}"

    def _member(self, name: str, address: Address) -> PoolMember:
        settings = self.settings.for_server(address.url)
        backend = OpenAIBackend(settings, name=self.name, address=address.connect)
        if self._isolation is not None:
            backend.isolate(self._isolation)
        if self._most_tokens is not None:
            backend.limit(self._most_tokens)
        return PoolMember(name, self.name, backend, self._fleet, self._tell_lost)

    def isolate(self, isolation: TenantIsolation) -> None:
        self._isolation = isolation
        for member in self.members:
            member.backend.isolate(isolation)

    def limit(self, max_tokens: int) -> None:
        self._most_tokens = max_tokens
        for member in self.members:
            member.backend.limit(max_tokens)

    async def check_isolation(self) -> None:
        """Raises `ConfigurationError` if one that answers cannot keep several tenants apart."""
        await asyncio.gather(*(member.backend.check_isolation() for member in self.members))

    async def leave_loop(self) -> None:
        await asyncio.gather(*(member.backend.leave_loop() for member in self.members))

    async def aclose(self) -> None:
        await asyncio.gather(*(member.backend.aclose() for member in self.members))

    def _tell_lost(self, name: str) -> None:
        for tell in self.lost:
            tell(name)
