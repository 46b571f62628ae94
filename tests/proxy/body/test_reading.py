from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message

from agentspec.errors import InvalidRequestError, RequestTooLargeError
from agentspec.proxy.body.reading import read_body

DECLARED = {"content-type": "application/json"}


def receiver(*messages: Message) -> Any:
    pending = list(messages)

    async def receive() -> Message:
        return pending.pop(0)

    return receive


def part(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.anyio
async def test_a_body_in_parts() -> None:
    receive = receiver(part(b"ab", True), part(b"", True), part(b"c"))
    assert await read_body(Headers(DECLARED), receive, 3) == b"abc"


@pytest.mark.anyio
@pytest.mark.parametrize("length", ["2", "2 ", "\t2"])
async def test_blanks_around_a_length_do_not_count(length: str) -> None:
    assert await read_body(Headers({**DECLARED, "content-length": length}), receiver(part(b"{}")), 3) == b"{}"


@pytest.mark.anyio
@pytest.mark.parametrize("length", ["4", "99999999999999999999999999", "-1", "x", ""])
async def test_a_declared_length_is_refused_unread(length: str) -> None:
    with pytest.raises(RequestTooLargeError):
        await read_body(Headers({**DECLARED, "content-length": length}), receiver(), 3)


@pytest.mark.anyio
async def test_an_undeclared_length_is_refused_at_the_limit() -> None:
    endless = receiver(*(part(b"x", True) for _ in range(10)))
    with pytest.raises(RequestTooLargeError, match="3 bytes"):
        await read_body(Headers(DECLARED), endless, 3)


@pytest.mark.anyio
async def test_a_client_that_leaves() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body(Headers(DECLARED), receiver(part(b"x", True), {"type": "http.disconnect"}), 3)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {**DECLARED, "content-encoding": "gzip"},
        {"content-type": "multipart/form-data"},
    ],
)
async def test_other_types_and_encodings_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"Content-(Type|Encoding)"):
        await read_body(Headers(headers), receiver(part(b"{}")), 3)


@pytest.mark.anyio
@pytest.mark.parametrize("charset", ["utf-7", "utf-16", "utf-8; charset=utf-16", "'utf-8'"])
async def test_other_charsets_are_refused(charset: str) -> None:
    headers = Headers({"content-type": f"application/json; charset={charset}"})
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        await read_body(headers, receiver(part(b"{}")), 3)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "second",
    [(b"content-type", b"text/plain"), (b"content-type", b"application/json"), (b"content-encoding", b"gzip")],
)
async def test_a_second_header_is_no_way_around(second: tuple[bytes, bytes]) -> None:
    first = [(b"content-type", b"application/json"), (b"content-encoding", b"identity")]
    with pytest.raises(InvalidRequestError, match=r"Content-(Type|Encoding)"):
        await read_body(Headers(raw=[*first, second]), receiver(part(b"{}")), 3)


@pytest.mark.anyio
async def test_charset_is_allowed() -> None:
    assert (
        await read_body(Headers({"content-type": "Application/JSON; charset=utf-8"}), receiver(part(b"{}")), 3) == b"{}"
    )
