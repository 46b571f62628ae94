"""The servers of one `[backends.NAME]` table, which may come and go."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import HttpUrl

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.member import PoolMember
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
    """The servers at `urls`, named by host and port, and by path and scheme too where that does not tell them apart."""
    urls = tuple(urls)
    ways = [_names(url) for url in urls]
    shared = Counter(name for names in ways for name in names)
    return tuple(
        Address(next((name for name in names if shared[name] == 1), names[-1]), url)
        for names, url in zip(ways, urls, strict=True)
    )


def _names(url: HttpUrl) -> tuple[str, str, str]:
    """What a server may be called, the shortest first."""
    place = f"{_shown(url.host or '')}:{url.port}"
    whole = f"{place}{url.path}"
    return place, whole, f"{url.scheme}://{whole}"


async def discover(settings: OpenAISettings) -> tuple[Address, ...]:
    """Look now. Raises `DiscoveryError` if nothing could be found: what was found before then holds."""
    if settings.base_urls is not None:
        return listed(settings.base_urls)
    async with _limited():
        found = await _addresses(settings.url)
    if not found:
        raise DiscoveryError(f"{settings.url.host} has no address")
    return found


@asynccontextmanager
async def _limited() -> AsyncIterator[None]:
    """Turns what fails in a lookup, or takes too long, into a `DiscoveryError`."""
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            yield
    except TimeoutError:
        raise DiscoveryError(f"no answer within {LOOKUP_SECONDS:g} s") from None
    except (OSError, UnicodeError) as error:
        raise DiscoveryError(str(error)) from None


async def _addresses(url: HttpUrl) -> tuple[Address, ...]:
    """One server for each A and AAAA record of the host."""
    port = url.port or 443
    found = await asyncio.wrap_future(_lookup(url.host or "", port))
    return tuple(Address(f"{_shown(address)}:{port}", url, address) for address in found)


def _lookup(host: str, port: int) -> Future[list[str]]:
    """The addresses of a host, sorted, found in a thread of its own: the resolver cannot be stopped, takes long
    where DNS does not answer, and must hold up no other work, the end of the process included.
    """
    answer: Future[list[str]] = Future()
    answer.set_running_or_notify_cancel()  # who waits for it may give up; it goes on

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

    `only` is the backend of a table with one address, which is ready already. `lost` holds what is called with the name
    of a member that is gone, or has failed so that its caches probably are.
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
            self.members = (PoolMember(name, name, backend, fleet, lost=self._tell_lost),)
        elif settings.base_urls is not None:
            self.members = tuple(self._member(address) for address in listed(settings.base_urls))

    @property
    def is_dynamic(self) -> bool:
        """Whether servers come and go."""
        return self.settings.resolve != "off"

    async def refresh(self, now: float) -> None:
        """Look which servers there are now. Those known before stay if that cannot be found out."""
        self.look_at = now + DISCOVERY_SECONDS  # nobody else looks meanwhile
        try:
            found = await discover(self.settings)
        except DiscoveryError as error:
            if str(error) != self._complaint:
                logger.warning("backends.%s: its servers cannot be found out: %s", self.name, error)
            self._complaint = str(error)
        else:
            self._complaint = ""
            await self._update(found)
        self.looked = True

    async def _update(self, found: Sequence[Address]) -> None:
        known = {member.name: member for member in self.members}
        wanted = {self._named(address): address for address in found}
        kept = {name: one for name, one in known.items() if name in wanted}
        self.members = tuple(kept.get(name) or self._member(address) for name, address in wanted.items())
        gone = [member for name, member in known.items() if name not in kept]
        if gone or len(wanted) > len(kept):
            logger.info("backends.%s: %d servers, %d of them new", self.name, len(wanted), len(wanted) - len(kept))
        for member in gone:
            self._tell_lost(member.name)
            await member.backend.aclose()  # its running calls go on to their ends

    def _named(self, address: Address) -> str:
        return f"{self.name}/{address.name}"

    def _member(self, address: Address) -> PoolMember:
        settings = self.settings.for_server(address.url)
        backend = OpenAIBackend(settings, name=self.name, address=address.connect)
        if self._isolation is not None:
            backend.isolate(self._isolation)
        if self._most_tokens is not None:
            backend.limit(self._most_tokens)
        return PoolMember(self._named(address), self.name, backend, self._fleet, lost=self._tell_lost)

    def is_due(self, now: float) -> bool:
        """Whether to look for servers now."""
        return self.is_dynamic and now >= self.look_at

    def isolate(self, isolation: TenantIsolation) -> None:
        self._isolation = isolation
        for member in self.members:
            member.backend.isolate(isolation)

    def limit(self, max_tokens: int) -> None:
        self._most_tokens = max_tokens
        for member in self.members:
            member.backend.limit(max_tokens)

    async def check_isolation(self) -> None:
        """Raises `ConfigurationError` if one that answers could not keep several tenants apart."""
        await asyncio.gather(*(member.backend.check_isolation() for member in self.members))

    async def leave_loop(self) -> None:
        await asyncio.gather(*(member.backend.leave_loop() for member in self.members))

    async def aclose(self) -> None:
        await asyncio.gather(*(member.backend.aclose() for member in self.members))

    def _tell_lost(self, name: str) -> None:
        for tell in self.lost:
            tell(name)
