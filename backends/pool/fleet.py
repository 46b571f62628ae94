"""All pools of a gateway and their servers: built from settings, found by name, and probed in the background."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import HttpUrl

from agentspec.backends.http import MAX_LIST_BYTES
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.metrics import parse_load
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.pool.member import PoolMember, current_time
from agentspec.backends.pool.pool import Pool
from agentspec.backends.settings import FleetSettings, OpenAISettings, PoolSpec
from agentspec.errors import UpstreamError
from agentspec.placement import POLICIES
from agentspec.telemetry.samples import MemberSample

if TYPE_CHECKING:
    from agentspec.backends.openai.isolation import TenantIsolation

logger = logging.getLogger(__name__)

LOOKUP_SECONDS = 5.0
DISCOVERY_SECONDS = 5.0  # between two lookups of a name
INTERVAL_SECONDS = 1.0  # between two looks at a server
LOOK_SECONDS = 2.0  # that one request of a look may take


class Address(NamedTuple):
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
    """Look now. Raises `OSError` or `UnicodeError` if nothing could be found: the earlier result then holds."""
    if settings.base_urls is not None:
        return listed(settings.base_urls)
    host, port = settings.url.host or "", settings.url.port or 443
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            found = await asyncio.wrap_future(_lookup(host, port))
    except TimeoutError:
        raise OSError(f"no answer within {LOOKUP_SECONDS:g} s") from None
    if not found:
        raise OSError(f"{host} has no address")
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
            self.members = (PoolMember(name, name, backend, fleet, self._report_lost),)
        elif settings.base_urls is not None:
            self.members = tuple(self._member(self._named(one), one) for one in listed(settings.base_urls))

    @property
    def is_dynamic(self) -> bool:
        """Whether servers come and go."""
        return self.settings.resolve != "off"

    async def refresh(self) -> None:
        """Look which servers there are now. Those known before stay if that cannot be found out."""
        self.look_at = current_time() + DISCOVERY_SECONDS
        try:
            wanted = {self._named(address): address for address in await discover(self.settings)}
        except (OSError, UnicodeError) as error:
            if str(error) != self._complaint:
                logger.warning("backends.%s: its servers cannot be found: %s", self.name, error)
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
            self._report_lost(member.name)
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
        return PoolMember(name, self.name, backend, self._fleet, self._report_lost)

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

    def _report_lost(self, name: str) -> None:
        for report in self.lost:
            report(name)


class PoolWatch:
    """Looks at the servers in the background, in the event loop of the first call: which there are, whether they are
    alive, how busy they are. `running` are the looks under way, by the name of the server or of the backend.
    """

    def __init__(self, servers: Sequence[Servers]) -> None:
        self._servers = servers
        self._task: asyncio.Task[None] | None = None
        self.running: dict[str, asyncio.Task[None]] = {}

    def ensure(self) -> None:
        """Begin, unless it runs: another loop's task ended with its loop."""
        if self._task is None or self._task.done() or self._task.get_loop().is_closed():
            self.running.clear()
            self._look_around()
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """End it, whichever loop it runs in. Idempotent."""
        task, self._task = self._task, None
        if task is None or task.get_loop().is_closed():
            return
        tasks = [task, *self.running.values()]
        for one in tasks:
            task.get_loop().call_soon_threadsafe(one.cancel)
        if task.get_loop() is asyncio.get_running_loop():
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self._look_around()

    def _look_around(self) -> None:
        for servers in self._servers:
            if servers.is_dynamic and current_time() >= servers.look_at:
                self._begin(f"backends.{servers.name}", servers.refresh)
            for member in servers.members if servers.settings.probe else ():
                self._begin(member.name, partial(_look, member))

    def _begin(self, name: str, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin a look, at most one at a time for each server."""
        if name not in self.running:
            self.running[name] = task = asyncio.get_running_loop().create_task(look())
            task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self.running.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the look at %s failed", name, exc_info=error)


async def _look(member: PoolMember) -> None:
    """Whether it answers `GET /health`, with a status below 500: vLLM says 503 there once its engine is dead. Then what
    it is, so that no call has to ask, and how busy.
    """
    alive = False
    asked = member.backend.endpoint.send("GET", "/health", headers={}, above=True, probing=True)
    with suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS), asked as response:
            alive = response.status < 500
    member.probed(alive=alive)
    if not alive or await member.backend.server_kind() not in ("vllm", "sglang"):
        return
    load = None
    asked_metrics = member.backend.endpoint.fetch("GET", "/metrics", above=True, limit=MAX_LIST_BYTES, probing=True)
    with suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS):
            load = parse_load((await asked_metrics).decode("utf-8", "replace"))
    member.measured(load)


class Fleet:
    """The pools of `specs`, by name, made of the backends that they name.

    `ready` are backends with one address that exist already. Nothing is done in the background before `begin`.
    """

    def __init__(
        self,
        specs: Mapping[str, PoolSpec],
        backends: Mapping[str, OpenAISettings],
        ready: Mapping[str, OpenAIBackend],
        settings: FleetSettings,
    ) -> None:
        used = dict.fromkeys(target.backend for spec in specs.values() for target in spec.targets)
        self.servers = {name: Servers(name, backends[name], settings, ready.get(name)) for name in used}
        self._watch = PoolWatch(list(self.servers.values()))
        self.backends = {name: PoolBackend(self._build(spec, settings)) for name, spec in specs.items()}

    def _build(self, spec: PoolSpec, settings: FleetSettings) -> Pool:
        targets = [(self.servers[target.backend], target.model) for target in spec.targets]
        return Pool(spec.name, targets, POLICIES[spec.placement](), settings, self.begin)

    async def begin(self) -> None:
        """Look at the servers from now on, in this loop; returns once the first lookups of their names have ended."""
        self._watch.ensure()
        for servers in self.servers.values():
            if servers.is_dynamic and not servers.looked:
                look = self._watch.running.get(f"backends.{servers.name}")
                if look is not None and look.get_loop() is asyncio.get_running_loop():
                    await asyncio.wait([look])  # of several calls, any may be cancelled
                else:
                    await servers.refresh()

    async def aclose(self) -> None:
        """End the looks, and close the connections. Idempotent."""
        await self._watch.aclose()
        for servers in self.servers.values():
            await servers.aclose()

    def samples(self) -> list[MemberSample]:
        """How the members are now."""
        return [member.sample() for servers in self.servers.values() for member in servers.members]
