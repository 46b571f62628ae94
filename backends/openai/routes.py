"""Finds out which routes an upstream has besides those of chats and completions."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from agentspec.backends.base import MESSAGES, RESPONSES
from agentspec.backends.http import Endpoint
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import UpstreamError

KEPT_SECONDS = 3600.0  # how long an answer holds: another server may replace the upstream
RETRY_SECONDS = 60.0  # after an answer that tells nothing, such as a refused key
LOOK_SECONDS = 2.0
_ACCOUNT = ("authorization", "x-api-key", "openai-", "anthropic-")  # another header would tell of the real request
_HAS, _HAS_NOT = (400, 422), (200, 404, 405, 501)  # a server that takes an empty request has no such route either


class RouteDetector:
    """Tells whether an upstream has a route: by the configuration, or by an empty request, which costs it nothing.

    Safe to use from several event loops.
    """

    def __init__(self, endpoint: Endpoint, settings: OpenAISettings) -> None:
        self._endpoint = endpoint
        self._declared = {MESSAGES: settings.messages, RESPONSES: settings.responses}
        self._found: dict[str, tuple[bool, float]] = {}

    async def has(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether `path` is there, asked with the client's key in `headers`. Missing while it is not known."""
        declared = next((how for root, how in self._declared.items() if path.startswith(root)), "auto")
        if declared != "auto":
            return declared == "on"
        found, until = self._found.get(path, (False, -math.inf))
        if time.monotonic() < until:
            return found
        status = await self._ask(path, headers)
        known = status in _HAS or status in _HAS_NOT
        found = status in _HAS if known else found
        self._found[path] = (found, time.monotonic() + (KEPT_SECONDS if known else RETRY_SECONDS))
        return found

    async def _ask(self, path: str, headers: Mapping[str, str]) -> int:
        """The status of an empty request; 0 without an answer."""
        account = {name: value for name, value in headers.items() if name.startswith(_ACCOUNT)}
        given = {**account, "content-type": "application/json"}
        sending = self._endpoint.send("POST", path, headers=given, body=b"{}", timeout=LOOK_SECONDS)
        try:
            async with sending as response:
                return response.status
        except UpstreamError:
            return 0
