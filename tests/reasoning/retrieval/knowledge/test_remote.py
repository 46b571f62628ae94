"""The client against a service that says anything, and against our own."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentspec.backends.http import httpx
from agentspec.errors import ConfigurationError, KnowledgeBaseError
from agentspec.proxy import knowledge
from agentspec.proxy.knowledge import create_service
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase, ranked
from agentspec.reasoning.retrieval.knowledge.dense import DenseMetric
from agentspec.reasoning.retrieval.knowledge.memory import IndexKnowledge, Snapshot
from agentspec.reasoning.retrieval.knowledge.remote import RemoteKnowledge
from agentspec.reasoning.retrieval.knowledge.settings import RemoteSettings
from agentspec.reasoning.retrieval.knowledge.wire import MAX_QUERIES
from agentspec.testing import FakeEncoder

pytestmark = pytest.mark.anyio

TEXTS = ["the cat purrs", "the dog barks", "a river flows", "the cat sleeps"]


def remote(answer: Callable[..., Any], *, dense: DenseMetric | None = None, **options: Any) -> RemoteKnowledge:
    """A client whose service is `answer`, a function from a request to a response."""
    settings = RemoteSettings.model_validate({"url": "http://kb.test/v", **options})
    return RemoteKnowledge(settings, dense, transport=httpx.MockTransport(answer))


def response(content: Any, status: int = 200) -> httpx.Response:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx.Response(status, stream=httpx.ByteStream(data))


def saying(answer: Any) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: response(answer)


def hit(name: str, score: Any = 1.0, **more: Any) -> dict[str, Any]:
    return {"id": name, "text": f"text of {name}", "score": score, **more}


async def found(base: KnowledgeBase, text: str = "cat", count: int = 3) -> list[str]:
    answer = await base.search([await base.metric.encode(text)], count)
    return [hit.document.id for hit in answer.hits[0]]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dense", {"ranks_by": "dense", "model": "fake"}), ("bm25", {"ranks_by": "bm25"}), ("dense", {})],
)
async def test_a_service_of_our_own_ranks_as_its_index_does(make_index, kind, options):
    index = make_index(kind, TEXTS)
    metric = DenseMetric(FakeEncoder()) if options.get("model") else None
    prefixed = httpx.ASGITransport(create_service(IndexKnowledge(Snapshot(index, "7"))))
    settings = RemoteSettings.model_validate({"url": "http://kb.test", **options})
    base = RemoteKnowledge(settings, metric, transport=prefixed)
    asked = ["the cat", "a dog", "the cat"]
    answer = await base.search([await base.metric.encode(text) for text in asked], 3)
    own = index.search([await index.metric.encode(text) for text in asked], 3)
    assert answer.version == "7"
    assert [[(one.document, one.score) for one in hits] for hits in answer.hits] == [
        [(one.document, one.score) for one in hits] for hits in own
    ]
    if options:
        for text, hits in zip(asked, answer.hits, strict=True):
            assert base.metric.scores(await base.metric.encode(text), hits).tolist() == [one.score for one in hits]
    await base.aclose()


async def test_a_service_with_another_model_encodes_the_text_itself(make_index):
    service = create_service(IndexKnowledge(Snapshot(make_index("dense", TEXTS), "7")))
    body = {
        "queries": [{"text": "dog", "vector": base64.b64encode(b"\0" * 64).decode()}],
        "count": 1,
        "encoder": "other",
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://kb") as client:
        answer = (await client.post("/search", json=body)).json()
        assert answer["results"][0][0]["id"] == "001"
        assert answer["encoder"] == "fake-16"
        assert (await client.get("/health")).json() == {"status": "ok"}


@pytest.mark.parametrize(
    "body",
    [
        b"no",
        b"[]",
        b'{"queries": [], "count": 1}',
        b'{"queries": [{"text": 1}], "count": 1}',
        b'{"queries": [{"text": "a"}]}',
        b'{"queries": [{"text": "a"}], "count": 0}',
        b'{"queries": [{"text": "a"}], "count": true}',
        b'{"queries": [{"text": "a", "vector": "?"}], "count": 1}',
        b'{"queries": [{"text": "a", "vector": "AADAfw=="}], "count": 1}',
        b'{"queries": [{"text": "a"}], "count": 1, "encoder": 1}',
        json.dumps({"queries": [{"text": "a"}] * (MAX_QUERIES + 1), "count": 1}).encode(),
        b"[" * 100_000,
        b'{"queries": [{"text": "\\ud800"}], "count": 1}',
        b'{"queries": [{"text": "a"}], "count": 1, "count": 2}',
    ],
)
async def test_a_service_refuses_what_is_no_search(make_index, body):
    service = create_service(IndexKnowledge(Snapshot(make_index("bm25", TEXTS), "7")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://kb") as client:
        answer = await client.post("/search", content=body)
        assert answer.status_code == 400 and "not a search" in answer.json()["error"]["message"]
        assert (await client.post("/search", content=b" " * (9 << 20))).status_code == 413


async def test_searches_at_once_are_bounded_in_memory(make_index, monkeypatch):
    monkeypatch.setattr(knowledge, "MAX_BODY_MEMORY", 1000)
    service = create_service(IndexKnowledge(Snapshot(make_index("bm25", TEXTS), "7")))
    search = {"queries": [{"text": "dog"}], "count": 1}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://kb.test") as client:
        refused = await client.post("/search", json={**search, "queries": [{"text": "dog " * 300}]})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert (await client.post("/search", json=search)).status_code == 200


async def test_a_batch_is_one_request():
    requests: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://kb.test/v/search"
        requests.append(json.loads(request.content))
        return response({"version": "1", "results": [[hit("a")], [], [hit("b")]]})

    base = remote(answer)
    answered = await base.search([await base.metric.encode(text) for text in ("x", "y", "z")], 2)
    assert requests == [{"queries": [{"text": "x"}, {"text": "y"}, {"text": "z"}], "count": 2}]
    assert [len(hits) for hits in answered.hits] == [1, 0, 1]
    assert (await base.search([], 2)).hits == () and len(requests) == 1
    with pytest.raises(ConfigurationError, match="at least one"):
        await base.search([], 0)


async def test_order_is_ours_a_document_comes_once_and_more_than_asked_are_dropped():
    documents = [hit("b"), hit("c", 2.0), hit("a"), hit("c", 0.5), hit("d", -1)]
    for shuffled in (documents, documents[::-1]):
        assert await found(remote(saying({"results": [shuffled]})), count=3) == ["c", "a", "b"]


async def test_by_words_the_cache_ranks_by_the_text_alone():
    base = remote(saying({"results": [[hit("dog", 2.0), hit("cat", 1.0)]]}))
    query = await base.metric.encode("the cat")
    (hits,) = (await base.search([query], 2)).hits
    assert ranked(hits, base.metric.scores(query, hits))[0].document.id == "cat"


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"results": {}},
        {"results": []},
        {"results": [[1]]},
        {"results": [[{"id": "a", "score": 1}]]},
        {"results": [[hit("a", "high")]]},
        {"results": [[hit("a", True)]]},
        {"results": [[hit("a", 10**400)]]},
        {"results": [[hit("a", weights={"x": 10**400})]]},
        {"results": [[hit("a") | {"id": 1}]]},
        {"results": [[hit("a", metadata=[])]]},
        {"results": [[hit("a", title="half a character: \ud800")]]},
        {"results": [[hit("a", vector="???")]]},
        {"results": [[hit("a", weights={"x": "y"})]]},
        {"results": [[hit("a")]], "version": 1},
        {"results": [[hit("a")]], "encoder": 1},
    ],
)
async def test_an_answer_that_is_none_is_an_error(answer):
    with pytest.raises(KnowledgeBaseError, match="no usable answer"):
        await found(remote(saying(answer)))


async def test_scores_that_are_no_numbers_are_an_error():
    def answer(request: httpx.Request) -> httpx.Response:
        return response(b'{"results": [[{"id": "a", "text": "t", "score": NaN}]]}')

    with pytest.raises(KnowledgeBaseError, match="finite"):
        await found(remote(answer))


async def test_promised_weights_and_vectors_must_come():
    with pytest.raises(KnowledgeBaseError, match="without weights"):
        await found(remote(saying({"results": [[hit("a")]]}), ranks_by="bm25"))
    dense = {"ranks_by": "dense", "model": "fake"}
    short = base64.b64encode(np.zeros(3, "<f4").tobytes()).decode()
    for documents in ([hit("a")], [hit("a", vector=short)]):
        with pytest.raises(KnowledgeBaseError, match="without its vector"):
            answer = saying({"results": [documents], "encoder": "fake-16"})
            await found(remote(answer, dense=DenseMetric(FakeEncoder()), **dense))
    with pytest.raises(KnowledgeBaseError, match="ranks by embedding model other"):
        answer = saying({"results": [[]], "encoder": "other"})
        await found(remote(answer, dense=DenseMetric(FakeEncoder()), **dense))


async def test_a_service_that_fails_is_asked_as_often_as_set():
    calls: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(1)
        if len(calls) % 3:
            return response({"error": {"message": "busy"}}, 503)
        return response({"results": [[hit("a")]]})

    with pytest.raises(KnowledgeBaseError, match="answered 503: busy"):
        await found(remote(answer))
    assert len(calls) == 1
    assert await found(remote(answer, retries=1)) == ["a"]
    assert len(calls) == 3


async def test_a_service_that_is_down_or_slow_is_an_error():
    def down(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(3600)
        return httpx.Response(200)

    with pytest.raises(KnowledgeBaseError, match="could not be reached"):
        await found(remote(down))
    with pytest.raises(KnowledgeBaseError, match=r"no answer within 0\.5 s"):
        await found(remote(slow, timeout=0.5))
