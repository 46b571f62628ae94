"""The routes of the page: its files, which hold no data and need no key, and what its views fetch, which needs one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.api import json_response
from agentspec.proxy.endpoint import Services
from agentspec.proxy.middleware import RecordedRoute
from agentspec.proxy.routes.pages import Handler, Pages
from agentspec.proxy.ui.html import PAGE
from agentspec.proxy.ui.views import data_routes
from agentspec.version import __version__

ROOT = "/ui"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = {
    "default-src": "'none'",
    **dict.fromkeys(("script-src", "style-src", "connect-src", "img-src"), "'self'"),
    **dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'"),
    "require-trusted-types-for": "'script'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@cache
def page_files() -> dict[str, Path]:
    """The files of the page by their paths in URLs."""
    found = {f"{ROOT}/{file.relative_to(PAGE)}": file for file in PAGE.rglob("*") if file.suffix in KINDS}
    return {ROOT: PAGE / "index.html", **found}


def page_routes(services: Services, pages: Pages) -> Iterator[RecordedRoute]:
    """Every route of the page. Those of runs are there where runs are kept."""
    for path, file in page_files().items():
        yield RecordedRoute(path, _sending(file), "GET")
    yield RecordedRoute(f"{ROOT}/data/session", _describing(services), "GET")
    yield from data_routes(services, pages)
    if (runs := services.runs) is not None:
        yield RecordedRoute(f"{ROOT}/data/runs", runs.list_page, "GET", "uses_models")
        yield RecordedRoute(f"{ROOT}/data/run", runs.run_page, "GET", "uses_models")


def _sending(file: Path) -> Handler:
    response = Response(file.read_bytes(), headers=HEADERS, media_type=KINDS[file.suffix])

    async def send(request: Request) -> Response:
        return response

    return send


def _describing(services: Services) -> Handler:
    """Who the key's owner is, and the models that they may ask; which are local is known once they are loaded."""

    async def session(request: Request) -> Response:
        identity, runtime = RequestAnswer.of(request.scope).key, services.runtime
        assert identity is not None
        shown = {name: getattr(identity, name) for name in ("tenant", "uses_models", "reads_metrics")}
        names = runtime.models() if runtime.ready else []
        models = [{"name": name, "local": not runtime.route(name).upstream} for name in names]
        known = {"ready": runtime.ready, "models": models, "keeps_runs": services.runs is not None}
        return json_response({"version": __version__, **shown, **known})

    return session
