"""Scripted upstreams of the Messages and the Responses API: with the route, or with chats alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from tests.proxy.conftest import key_files

# Shared: a client of its own costs more than a request.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
Script = Callable[[Any], None]


def settings(url: str, folder: Path | None = None, **backend: Any) -> Settings:
    """A gateway of two tenants if `folder` is given, else without keys."""
    keys = () if folder is None else key_files(folder, "alice", "bob")
    up = OpenAISettings(base_url=url, **backend)  # type: ignore[arg-type]
    models = {"m": ModelSettings(backend="up")}
    return Settings(server=ServerSettings(api_keys=keys), backends={"up": up}, models=models)


def scripted(answer: Script, route: str, owner: str = "other") -> Script:
    """An upstream of `owner` with `route` alone; a route is asked for by an empty request, which it refuses."""

    def script(request: Any) -> None:
        if request.method == "GET" and request.target == "/v1/models":
            request.answer(json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode())
        elif not request.target.startswith(route):
            request.answer(b'{"detail":"Not Found"}', 404)
        elif request.body == b"{}":
            request.answer(b'{"error":{"message":"model is missing"}}', 400)
        else:
            answer(request)

    return script


def chats(answer: Script, owner: str = "other") -> Script:
    return scripted(answer, "/v1/chat/completions", owner)


def posted(server: Any, path: str | None = None) -> list[Any]:
    """The requests that came, without the empty ones that ask for a route."""
    found = [one for one in server.requests if one.method == "POST" and one.body != b"{}"]
    return [one for one in found if path in (None, one.target)]
