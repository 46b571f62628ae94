"""Feeds a tenant's sequences to an SGLang server without our plug-in, as one of its external corpora."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from agentspec.backends.http.endpoint import Endpoint
from agentspec.backends.http.failures import decode_json
from agentspec.errors import ConfigurationError, UpstreamError, UpstreamStatusError

PREFIX = "agentspec-"
LOADING_SECONDS = 600.0  # the server answers once it has read the corpus


class PushedCorpus:
    """A tenant's corpus on a server, which is replaced as a whole. An external corpus is drafted from for everybody."""

    def __init__(self, endpoint: Endpoint, tenant: str) -> None:
        self._endpoint = endpoint
        self._tenant = tenant
        self._name = PREFIX + quote(tenant, safe="")  # SGLang separates names by tabs and line ends
        self._pushed = b""

    async def push(self, documents: Sequence[str]) -> int | None:
        """Replace the corpus; returns the server's number of tokens, or None if it has just these documents already.

        Raises `ConfigurationError` where another tenant's corpus is on the server or it takes none, `UpstreamError`.
        """
        digest = hashlib.sha256(json.dumps(documents).encode()).digest()
        there = await self._there()
        if digest == self._pushed and self._name in there:
            return None
        if self._name in there:
            await self._call("POST", "/remove_external_corpus", {"corpus_id": self._name})
            self._pushed = b""
        if not documents:
            return 0
        answer = await self._call("POST", "/add_external_corpus", {"corpus_id": self._name, "documents": documents})
        self._pushed = digest
        return int(answer.get("loaded_token_count", 0))

    async def _there(self) -> set[str]:
        """The names of the server's corpora. Raises `ConfigurationError` if one is another tenant's."""
        answer = await self._call("GET", "/list_external_corpora", None)
        names: set[str] = set(answer.get("corpus_token_counts") or ())
        if others := sorted(name for name in names if name.startswith(PREFIX) and name != self._name):
            raise ConfigurationError(
                f"the server drafts from {others[0]!r} already, for everybody: use one server for each tenant, or"
                " remove that corpus first"
            )
        return names

    async def _call(self, method: str, path: str, body: object) -> dict[str, Any]:
        name = self._endpoint.name
        try:
            data = b"" if body is None else json.dumps(body).encode()
            answer = decode_json(
                await self._endpoint.fetch(method, path, body=data, timeout=LOADING_SECONDS, above=True), name
            )
        except UpstreamStatusError as error:
            if error.status == 404:
                raise ConfigurationError(f"{name} has no {path}: SGLang 0.5.23 or later has") from None
            raise UpstreamError(f"{error.message}: {_reason(error.upstream_body)}") from None
        if not isinstance(answer, dict) or not answer.get("success", True):
            raise UpstreamError(f"{name} refused {path}: {_reason(json.dumps(answer).encode())}")
        return answer


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])[:2000]
    except (ValueError, LookupError, TypeError):
        return "no reason given"
