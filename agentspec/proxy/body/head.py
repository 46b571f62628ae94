"""Checks the head of a request that goes to an upstream: header values and the query."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from starlette.types import Scope

from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.addresses import is_address

MAX_QUERY_BYTES = 8192
# RFC 9110, 5.5: visible ASCII, blanks, tabs, and bytes above ASCII, which have no agreed meaning but are passed on.
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_QUERY = re.compile(rb"[!-~]*")
# Azure's version, Anthropic's `?beta=true`, and what lists and streams are asked for by their page and place.
_NAMES = frozenset("api-version beta stream include include[] starting_after limit after before order".split())


def check_head(scope: Scope) -> None:
    """Raise `InvalidRequestError` for a head that an HTTP client could not send, or that names another address."""
    for name, value in scope["headers"]:
        if not _VALUE.fullmatch(value):
            shown = name[:80].decode("latin-1").encode("ascii", "replace").decode()
            raise InvalidRequestError(f"the header {shown} holds control characters", param=shown)
    query: bytes = scope.get("query_string", b"")
    if len(query) > MAX_QUERY_BYTES or not _QUERY.fullmatch(query):
        raise InvalidRequestError(f"the query must be at most {MAX_QUERY_BYTES} percent-encoded ASCII characters")
    for name, text in parse_qsl(query.decode(), keep_blank_values=True, errors="replace"):
        if name not in _NAMES or is_address(text):
            shown = name[:80].encode("ascii", "replace").decode()
            raise InvalidRequestError(f"the query's {shown!r} is refused: upstreams are configured", param=shown)
