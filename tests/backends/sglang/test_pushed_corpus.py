"""Pushing a tenant's sequences to an SGLang server, as its routes answer."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from agentspec.backends.http.endpoint import Endpoint
from agentspec.backends.http.library import httpx
from agentspec.backends.settings import OpenAISettings
from agentspec.backends.sglang.pushed_corpus import PushedCorpus
from agentspec.errors import AgentSpecError, ConfigurationError, UpstreamError


class Server:
    """SGLang's three routes: a corpus that is there already is refused, and so is one that is too long."""

    def __init__(self) -> None:
        self.corpora: dict[str, list[str]] = {}
        self.calls: list[str] = []
        self.gone = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request.url.path)
        if self.gone:
            return httpx.Response(404, json={"detail": "Not Found"})
        if request.url.path == "/list_external_corpora":
            counts = {name: sum(map(len, documents)) for name, documents in self.corpora.items()}
            return httpx.Response(200, json={"success": True, "corpus_token_counts": counts, "message": ""})
        body = json.loads(request.content)
        name = body["corpus_id"]
        if request.url.path == "/remove_external_corpus":
            del self.corpora[name]
            return httpx.Response(200, json={"success": True, "message": ""})
        if name in self.corpora or "too long" in body["documents"]:
            return httpx.Response(400, json={"success": False, "message": "exceeds the budget"})
        self.corpora[name] = body["documents"]
        count = sum(map(len, body["documents"]))
        return httpx.Response(
            200, json={"success": True, "corpus_id": name, "message": "", "loaded_token_count": count}
        )


def pusher(server: Any, tenant: str = "team a") -> PushedCorpus:
    settings = OpenAISettings.model_validate({"base_url": "http://server:30000/v1"})
    return PushedCorpus(Endpoint(settings, transport=httpx.MockTransport(server)), tenant)


def test_a_corpus_is_replaced_when_it_changes_or_the_server_lost_it() -> None:
    server = Server()
    corpus = pusher(server)
    assert anyio.run(corpus.push, ["one", "two"]) == 6
    assert server.corpora == {"agentspec-team%20a": ["one", "two"]}
    server.calls.clear()
    assert anyio.run(corpus.push, ["one", "two"]) is None
    assert server.calls == ["/list_external_corpora"]
    assert anyio.run(corpus.push, ["three"]) == 5
    assert server.corpora == {"agentspec-team%20a": ["three"]}
    server.corpora.clear()
    assert anyio.run(corpus.push, ["three"]) == 5
    assert anyio.run(pusher(server).push, ["three"]) == 5
    assert anyio.run(corpus.push, []) == 0
    assert server.corpora == {}


def test_other_corpora_stay_and_another_tenants_is_refused() -> None:
    server = Server()
    server.corpora["theirs"] = ["book"]
    anyio.run(pusher(server).push, ["one"])
    with pytest.raises(ConfigurationError, match=r"agentspec-team%20a.*one server for each tenant"):
        anyio.run(pusher(server, "b").push, ["two"])
    assert server.corpora == {"theirs": ["book"], "agentspec-team%20a": ["one"]}


@pytest.mark.parametrize(
    ("documents", "answer", "error", "says"),
    [
        (["too long"], None, UpstreamError, "exceeds the budget"),
        (["a"], httpx.Response(404), ConfigurationError, "SGLang 0.5.23"),
        (["a"], httpx.Response(500, text="no"), UpstreamError, "no reason given"),
        (["a"], httpx.Response(200, text="no"), UpstreamError, "not JSON"),
        (["a"], httpx.Response(200, json=[1]), UpstreamError, "refused"),
        (["a"], httpx.Response(200, json={"success": False, "message": "not enabled"}), UpstreamError, "not enabled"),
    ],
)
def test_what_the_server_refuses_is_told(
    documents: list[str], answer: httpx.Response | None, error: type[AgentSpecError], says: str
) -> None:
    server = Server() if answer is None else lambda request: answer
    with pytest.raises(error, match=says):
        anyio.run(pusher(server).push, documents)
