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
from pathlib import Path

from pydantic import HttpUrl, TypeAdapter, ValidationError

from agentspec.backends.settings import OpenAISettings, ServerRoot

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
    if settings.base_urls_file is not None:
        return await asyncio.to_thread(_read, Path(settings.base_urls_file).expanduser())
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
