"""An upstream's answer, and the headers that travel with it and with its request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager

from agentspec.backends.http.connections import httpcore, httpx
from agentspec.backends.http.errors import own_error
from agentspec.backends.http.proxies import Answer
from agentspec.errors import UpstreamError

MAX_ANSWER_BYTES = 64 << 20
SMALL_ANSWER_BYTES = 64 << 10
MAX_LIST_BYTES = 4 << 20  # of what describes a server: its models, its metrics

# Headers that may be forwarded with a request or an answer. Hop-by-hop headers, cookies and hosts are not among them.
REQUEST_HEADERS = frozenset({"accept", "authorization", "content-type", "idempotency-key", "user-agent", "x-api-key"})
REQUEST_PREFIXES = ("anthropic-", "openai-", "trace", "x-agentspec-", "x-request-id", "x-stainless-")
RESPONSE_HEADERS = frozenset({"content-encoding", "content-type", "retry-after", "retry-after-ms", "x-should-retry"})
RESPONSE_PREFIXES = ("anthropic-ratelimit-", "openai-", "x-agentspec-", "x-ratelimit-", "x-request-id")
# Headers that choose or name the account. With the operator's key they are left out.
ACCOUNT_HEADERS = frozenset({"openai-organization", "openai-project", "x-api-key"})
MEMBER_HEADER = "x-agentspec-member"  # for operators only, which another gateway takes this one for
_OWN_PREFIXES = ("openai-model", "openai-processing-", "openai-version", "x-agentspec-", "x-request-id")

_FAILURES = (httpx.HTTPError, httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError)
Room = Callable[[int], Awaitable[None]]  # reserves memory for so many bytes of an answer, or waits for it


class UpstreamResponse:
    """An upstream's answer while it arrives: `status`, the allowed `headers` (lower case) and the body in pieces.

    `own_key`: the request carried the operator's key, not the client's, so that headers about the account are left out.
    """

    def __init__(self, answer: Answer, name: str, *, own_key: bool = False) -> None:
        self.status = answer.status
        self.own_key = own_key
        self.name = name
        received = ((key.decode("latin-1"), value.decode("latin-1")) for key, value in answer.headers)
        self.headers = allowed(received, RESPONSE_HEADERS, _OWN_PREFIXES if own_key else RESPONSE_PREFIXES)
        self.headers.pop(MEMBER_HEADER, None)
        self._answer = answer

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").lower().startswith("text/event-stream")

    @property
    def is_encoded(self) -> bool:
        """Whether the body is compressed, although requests ask for one that is not."""
        return self.headers.get("content-encoding", "").lower() not in ("", "identity")

    async def aiter_raw(self) -> AsyncGenerator[bytes]:
        """The body's bytes exactly as the upstream sent them. Raises `UpstreamError` if the body breaks off."""
        with mapped_errors(self.name):
            while piece := await self._answer.read():
                yield piece

    async def aread(self, limit: int = MAX_ANSWER_BYTES, room: Room | None = None) -> bytes:
        """The whole body. Raises `UpstreamError` if it breaks off or is longer than `limit` bytes.

        Before more than `SMALL_ANSWER_BYTES` are held, `room` is asked for the bytes to come, all at once where the
        server has announced how many. Meanwhile the server has to wait.
        """
        length = next((value for name, value in self._answer.headers if name.lower() == b"content-length"), b"")
        announced = int(length[:20]) if length.isdigit() else 0
        pieces: list[bytes] = []
        size, allotted = 0, SMALL_ANSWER_BYTES if room else limit
        async with aclosing(self.aiter_raw()) as arriving:
            async for piece in arriving:
                size += len(piece)
                wanted = max(size, announced) if size > allotted else size
                if wanted > limit:
                    raise UpstreamError(f"upstream {self.name} answered with more than {limit} bytes")
                if room is not None and wanted > allotted:
                    await room(wanted - allotted)
                    allotted = wanted
                pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def allowed(headers: Iterable[tuple[str, str]], names: frozenset[str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """The headers that are named in `names` or begin with one of `prefixes`, in lower case."""
    lower = ((name.lower(), value) for name, value in headers)
    return {name: value for name, value in lower if name in names or name.startswith(prefixes)}


@contextmanager
def mapped_errors(name: str) -> Iterator[None]:
    """Turn every error of the HTTP library into an `UpstreamError` whose cause is the original."""
    try:
        yield
    except _FAILURES as error:
        raise own_error(name, error) from error
