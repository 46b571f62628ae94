"""The client against a service that says anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from agentspec.errors import KnowledgeBaseError
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase, ranked
from agentspec.reasoning.retrieval.knowledge.remote import RemoteKnowledge
from agentspec.reasoning.settings import RemoteSettings

pytestmark = pytest.mark.anyio


def remote(answer: Callable[..., Any]) -> RemoteKnowledge:
    """A client whose service is `answer`, a function from a request to a response."""
    settings = RemoteSettings.model_validate({"url": "http://kb.test/v"})
    return RemoteKnowledge(settings, transport=httpx.MockTransport(answer))


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


async def test_hits_are_sorted_deduplicated_and_limited():
    documents = [hit("b"), hit("c", 2.0), hit("a"), hit("c", 0.5), hit("d", -1)]
    for shuffled in (documents, documents[::-1]):
        assert await found(remote(saying({"results": [shuffled]})), count=3) == ["c", "a", "b"]
    base = remote(saying({"results": [[hit("dog", 2.0), hit("cat", 1.0)]]}))
    query = await base.metric.encode("the cat")
    (hits,) = (await base.search([query], 2)).hits  # the cache ranks them by their text alone
    assert ranked(hits, base.metric.scores(query, hits))[0].document.id == "cat"


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"results": []},
        {"results": [[{"id": "a", "score": 1}]]},
        {"results": [[hit("a", "high")]]},
        {"results": [[hit("a", 10**400)]]},
        {"results": [[hit("a", metadata=[])]]},
        {"results": [[hit("a", title="half a character: \ud800")]]},
        b'{"results": [[{"id": "a", "text": "t", "score": NaN}]]}',
        b"no JSON",
    ],
)
async def test_a_malformed_result_is_an_error(answer):
    with pytest.raises(KnowledgeBaseError, match="no usable answer"):
        await found(remote(saying(answer)))


async def test_a_service_that_fails_or_is_down_is_quoted_and_not_asked_again():
    calls: list[int] = []

    def busy(request: httpx.Request) -> httpx.Response:
        calls.append(1)
        return response({"error": {"message": "busy"}}, 503)

    def down(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(KnowledgeBaseError, match="answered 503: busy"):
        await found(remote(busy))
    assert len(calls) == 1
    with pytest.raises(KnowledgeBaseError, match="could not be reached"):
        await found(remote(down))
