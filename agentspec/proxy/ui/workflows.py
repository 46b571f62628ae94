"""What the view *Workflows* shows: the calls of each tenant, by the workflow and step that they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.api import json_response
from agentspec.proxy.auth import Identity
from agentspec.proxy.endpoint import Services
from agentspec.proxy.middleware import RecordedRoute
from agentspec.proxy.routes.pages import Pages


def workflow_routes(services: Services, pages: Pages) -> Iterator[RecordedRoute]:
    async def workflows(request: Request) -> Response:
        shown = visible_tenant(request)
        rows: list[dict[str, Any]] = []
        for tenant, statistics in list(pages.steps.items()):
            if shown in (None, tenant):
                rows += [{"tenant": tenant, **asdict(row)} for row in statistics.rows()]
        return json_response({"rows": rows})

    yield RecordedRoute("/ui/data/workflows", workflows, "GET")


def visible_tenant(request: Request) -> str | None:
    """The tenant that the request's key may see; None: an operator's, which sees all."""
    key: Identity | None = RequestAnswer.of(request.scope).key
    assert key is not None
    return None if key.reads_metrics else key.tenant
