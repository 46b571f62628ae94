"""Finds the servers of a backend: listed, by DNS, or in a file."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pydantic import HttpUrl, TypeAdapter, ValidationError

from agentspec.backends.settings import OpenAISettings, ServerRoot
from agentspec.errors import ConfigurationError, install_advice

LOOKUP_SECONDS = 5.0
_ROOT: TypeAdapter[HttpUrl] = TypeAdapter(ServerRoot)
_COMMENT = re.compile(r"(^|\s)#.*")


class DiscoveryError(Exception):
    """The servers could not be found out now. The message is for operators."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server: the root of its API, and the address to `connect` to if the root's host has several."""

    name: str
    url: HttpUrl
    connect: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """The servers of a backend, and after how many seconds to look again, if the answer told."""

    addresses: tuple[Address, ...]
    fresh_seconds: float | None = None


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


def check_discovery(settings: OpenAISettings) -> None:
    """Raises `ConfigurationError` if looking for the servers takes what is not installed."""
    if settings.resolve == "srv" and find_spec("dns") is None:
        raise ConfigurationError(f'resolve = "srv" needs dnspython; {install_advice("dns")}')


class HostLookup:
    """Looks up one host, in a thread of its own: the system's resolver cannot be stopped, and takes long where DNS does
    not answer. Whoever looks again meanwhile waits for the same answer, and one that came late is the next one's.
    """

    def __init__(self) -> None:
        self._answer: Future[list[str]] | None = None

    async def addresses(self, host: str, port: int) -> list[str]:
        """The A and AAAA records, sorted. Raises `OSError` or `UnicodeError`."""
        if self._answer is None:
            self._answer = self._begin(host, port)
        answer = self._answer
        try:
            return await asyncio.wrap_future(answer)
        finally:
            if answer.done():
                self._answer = None

    def _begin(self, host: str, port: int) -> Future[list[str]]:
        answer: Future[list[str]] = Future()
        answer.set_running_or_notify_cancel()  # who waits for it may give up; it goes on

        def look() -> None:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(sorted({str(one[4][0]) for one in found}))

        threading.Thread(target=look, name="agentspec-lookup", daemon=True).start()
        return answer


async def discover(settings: OpenAISettings, lookup: HostLookup | None = None) -> Found:
    """Look now. Raises `DiscoveryError` if nothing could be found: what was found before then holds. Who looks
    again and again has a `lookup` for it.
    """
    if settings.base_urls_file is not None:
        return Found(await asyncio.to_thread(_read, Path(settings.base_urls_file).expanduser()))
    if settings.base_urls is not None:
        return Found(listed(settings.base_urls))
    async with _limited():
        found = await (
            _service_records(settings.url)
            if settings.resolve == "srv"
            else _addresses(settings.url, lookup or HostLookup())
        )
    if not found.addresses:
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


async def _addresses(url: HttpUrl, lookup: HostLookup) -> Found:
    """One server for each A and AAAA record of the host. The standard library does not tell how long they hold."""
    port = url.port or 443
    found = await lookup.addresses(url.host or "", port)
    return Found(tuple(Address(f"{_shown(address)}:{port}", url, address) for address in found))


async def _service_records(url: HttpUrl) -> Found:
    """One server for each SRV record of the best priority, by its weight (RFC 2782).

    The name is tried in the system's search domains too, as an address is: Kubernetes' short names need them.
    """
    import dns.asyncresolver
    import dns.exception

    try:
        answer = await dns.asyncresolver.resolve(url.host or "", "SRV", search=True)
    except dns.exception.DNSException as error:
        raise DiscoveryError(f"{url.host}: {type(error).__name__}") from None
    records = [(one.priority, one.weight, str(one.target).rstrip(".").lower(), one.port) for one in answer]
    best = min((priority for priority, *_ in records), default=0)
    found = {(host, port): max(weight, 1) for priority, weight, host, port in records if priority == best and host}
    mean = sum(found.values()) / max(len(found), 1)
    served = tuple(_served(url, *one, weight / mean) for one, weight in sorted(found.items()))
    return Found(served, float(answer.rrset.ttl) if answer.rrset else None)


def _served(url: HttpUrl, host: str, port: int, weight: float) -> Address:
    try:
        root = HttpUrl.build(scheme=url.scheme, host=host, port=port, path=(url.path or "").lstrip("/"))
    except ValidationError:
        root = None
    if root is None or root.host != host:  # names may hold any bytes, and a slash would end the host
        raise DiscoveryError(f"{url.host}: a record names {host!r:.100}, which is no host")
    return Address(f"{host}:{port}", root, weight=weight)


def _read(path: Path) -> tuple[Address, ...]:
    """The servers in a file: a root a line, and comments, which begin with # at the line's start or behind a blank."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise DiscoveryError(f"{path}: {error}") from None
    texts = [text for line in lines if (text := _COMMENT.sub("", line).strip())]
    try:
        urls = list(dict.fromkeys(_ROOT.validate_python(text) for text in texts))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise DiscoveryError(f"{path}: {wrong['input']!r:.100} is no server's URL: {wrong['msg']}") from None
    if not urls:
        raise DiscoveryError(f"{path} names no server")
    found = listed(urls)
    name, times = Counter(one.name for one in found).most_common(1)[0]
    if times > 1:
        raise DiscoveryError(f"{path} names {name} under several users: one server is one line")
    return found


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
