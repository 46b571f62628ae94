"""The routes that describe the gateway: its state, version, models, metrics and the servers of its pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import Response

from agentspec.backends.base import is_local
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    UpstreamStatusError,
    UpstreamTimeoutError,
)
from agentspec.proxy.admission import Slots, until_disconnect
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.api import json_response
from agentspec.proxy.request_context import upstream_headers
from agentspec.runtime import Runtime
from agentspec.step.statistics import StepStatistics
from agentspec.telemetry.history import History
from agentspec.telemetry.metrics import CONTENT_TYPE, Metrics
from agentspec.telemetry.samples import EngineSample, IndexFigures, MemberSample
from agentspec.telemetry.scrape import ENGINE, INDEX, MEMBER, SPEC_DECODE, TENANT, OnScrape
from agentspec.types import Labels
from agentspec.version import __version__

MODELS_SECONDS = 10.0  # to list the models of an upstream
Handler = Callable[[Request], Awaitable[Response]]


class Pages:
    """The routes that describe the gateway: its state, version, models and metrics. `registry` holds the metrics,
    `history` their last half hour, and `steps` what each tenant's workflows cost.
    """

    def __init__(self, runtime: Runtime, slots: Slots) -> None:
        self._runtime = runtime
        self._slots = slots
        self._created = int(time.time())
        self.registry = Metrics(
            version=__version__,
            models=runtime.models(),
            scraped=(
                OnScrape(INDEX, lambda: index_figures(runtime)),
                OnScrape(ENGINE, lambda: engine_samples(runtime), backend="backend"),
                OnScrape(SPEC_DECODE, lambda: engine_samples(runtime), model_name="model", engine="backend"),
                OnScrape(TENANT, slots.samples, tenant="tenant"),
                OnScrape(MEMBER, lambda: upstream_samples(runtime), backend="backend", member="member"),
            ),
        )
        self.history = History(self.registry.registry)
        self.steps: dict[str, StepStatistics] = {}

    def routes(self) -> dict[str, Handler]:
        return {
            "/health": self.health,
            "/ready": self.ready,
            "/version": self.version,
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
        }

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Report whether the gateway accepts requests: 200, or 503 while it loads, drains, or has a failed backend.

        Only clients with a key see which of these it is.
        """
        status = "draining" if self._slots.closed else "ready" if self._runtime.ready else "loading"
        if self._runtime.failure is not None:
            status = "failed"
        shown = RequestAnswer.of(request.scope).key is not None or status == "ready"
        return json_response({"status": status if shown else "not ready"}, 200 if status == "ready" else 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        rendered = await anyio.to_thread.run_sync(self.registry.render)
        return Response(rendered, headers={"content-type": CONTENT_TYPE})

    async def fleet(self, request: Request) -> Response:
        return json_response({"members": [asdict(sample) for sample in upstream_samples(self._runtime)]})

    async def models(self, request: Request) -> Response:
        found = await self._objects(request)
        if "anthropic-version" not in request.headers:
            return json_response({"object": "list", "data": found})
        data, more = _page([_as_anthropics(model) for model in found], request.query_params)
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return json_response({"data": data, "has_more": more, **ends})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        found = next((model for model in await self._objects(request) if model["id"] == name), None)
        if found is None:
            raise ModelNotFoundError(f"no model {name[:256]!r} here", param="model")
        return json_response(_as_anthropics(found) if "anthropic-version" in request.headers else found)

    async def _objects(self, request: Request) -> list[dict[str, Any]]:
        """The configured models and their aliases; without any, those of the sole upstream, which accepts any name."""
        names, aliases = self._runtime.models(), [self._object(alias) for alias in self._runtime.aliases]
        if names or not (self._runtime.ready and self._runtime.takes_any_model):
            return [self._object(name) for name in names] + aliases
        backend = self._runtime.route("*").backend
        listed = await self._listed(backend, request) if isinstance(backend, OpenAIBackend | PoolBackend) else []
        return listed + aliases

    async def _listed(self, backend: OpenAIBackend | PoolBackend, request: Request) -> list[dict[str, Any]]:
        """The models of an upstream. The call takes a slot like others, or clients could open any number of them."""
        answer = RequestAnswer.of(request.scope)
        headers = upstream_headers(request.scope, answer, Labels())
        try:
            async with until_disconnect(request.receive), self._slots.enter(answer.tenant):
                async with asyncio.timeout(MODELS_SECONDS):
                    return await backend.models(headers)
        except TimeoutError:
            raise UpstreamTimeoutError("the upstream did not list its models in time") from None
        except UpstreamStatusError as error:
            error.for_client = not (answer.has_gateway_key or error.own_key)
            raise

    def _object(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "agentspec"}


def _as_anthropics(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model as Anthropic's API lists it."""
    created = model.get("created")
    made = datetime.fromtimestamp(created if type(created) is int and 0 <= created < 1 << 34 else 0, UTC)
    about = {"display_name": model["id"], "created_at": made.isoformat(), "lifecycle": "active"}
    return {"type": "model", "id": model["id"], **about}


def _page(models: list[dict[str, Any]], query: Mapping[str, str]) -> tuple[list[dict[str, Any]], bool]:
    """The models that `limit`, `after_id` and `before_id` ask for, and whether there are more on that side."""
    limit = query.get("limit", "1000")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:5]) <= 1000):
        raise InvalidRequestError("limit must be an integer from 1 to 1000", param="limit")
    places = {model["id"]: at for at, model in enumerate(models)}
    end = places.get(query.get("before_id", ""), len(models))
    start = places.get(query.get("after_id", ""), -1) + 1
    if "before_id" in query:
        return models[max(start, end - int(limit)) : end], start < end - int(limit)
    return models[start:end][: int(limit)], start + int(limit) < end


def index_figures(runtime: Runtime) -> list[IndexFigures]:
    """Figures of the token index and its database; none where there is no index."""
    if not runtime.keeps_index:
        return []
    stats = runtime.cache.stats()
    held = stats.memory_bytes, stats.sequences
    return [IndexFigures(*held, stats.damaged, stats.unread, stats.behind, stats.erasure_pending)]


def upstream_samples(runtime: Runtime) -> list[MemberSample]:
    """The servers of pools, and each upstream that is alone: it is "failing" since its last call failed."""
    found = runtime.fleet.samples() if runtime.fleet else []
    pooled, states = {one.backend for one in found}, {None: "unknown", True: "failing", False: "ready"}
    for name, one in runtime.backends().items():
        if isinstance(one, OpenAIBackend) and name not in pooled:
            way = one.endpoint
            found.append(MemberSample(name, name, states[way.failing], way.in_flight, way.calls, 0, way.failures))
    return found


def engine_samples(runtime: Runtime) -> list[EngineSample]:
    """The counts of the engines, each with the first model that it serves."""
    engines = {name: backend for name, backend in runtime.backends().items() if is_local(backend, "sample")}
    models = {runtime.route(model).backend_name: model for model in reversed(runtime.models())} if engines else {}
    return [replace(backend.sample(name), model=models.get(name, name)) for name, backend in engines.items()]
