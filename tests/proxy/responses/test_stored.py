"""Stored responses over HTTP: conversations that go on by id, listing, deletion, tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from agentspec.cache.settings import CacheSettings
from agentspec.errors import CacheUnavailableError
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest
from tests.proxy.conftest import key_files
from tests.proxy.upstreams import HTTP

MODEL = "fake"
TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


def script(request: GenerateRequest) -> Any:
    asked = str((request.messages or [{}])[-1].get("content"))
    if asked == "call":
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        return Answer("", extra={"reasoning_content": "hm", "tool_calls": [call]}, finish_reason="tool_calls")
    return f"answer to {asked}"


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(script)


@pytest.fixture(scope="module")
def running(shared_gateway: Any, backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("stored")
    return shared_gateway({MODEL: backend}, two_tenants(folder, path=folder / "cache"))


def two_tenants(folder: Path, **cache: Any) -> Settings:
    server = ServerSettings(api_keys=key_files(folder, "alice", "bob"))
    return Settings(server=server, cache=CacheSettings(**cache), backends={})


@pytest.fixture(scope="module")
def alice(running: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="key-of-alice", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def bob(running: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="key-of-bob", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, input: Any = "hi", **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=input, **fields)


def messages(backend: FakeBackend) -> list[tuple[Any, Any]]:
    return [(one["role"], one["content"]) for one in backend.requests[-1].messages or ()]


def test_a_conversation_goes_on_by_id(alice: openai.OpenAI, backend: FakeBackend) -> None:
    first = ask(alice, "one", instructions="be brief")
    second = ask(alice, "two", previous_response_id=first.id)
    with alice.responses.stream(model=MODEL, input="three", previous_response_id=second.id) as stream:
        third = stream.until_done().get_final_response()
    assert third.previous_response_id == second.id
    # Instructions are those of the request alone.
    assert messages(backend) == [
        ("user", "one"), ("assistant", "answer to one"), ("user", "two"), ("assistant", "answer to two"),
        ("user", "three"),
    ]  # fmt: skip
    again = alice.responses.retrieve(third.id)
    assert again.output_text == "answer to three" and again.usage == third.usage
    assert {**again.to_dict(), "output": 0} == {**third.to_dict(), "output": 0}


def test_calls_and_thoughts_go_on_by_id(alice: openai.OpenAI, backend: FakeBackend) -> None:
    first = ask(alice, "call", tools=[TOOL])
    ask(alice, [{"type": "function_call_output", "call_id": "c1", "output": "42"}], previous_response_id=first.id)
    _, turn, result = backend.requests[-1].messages or ()
    assert turn["reasoning_content"] == "hm" and turn["tool_calls"][0]["function"]["name"] == "look"
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "42"}


def test_a_deleted_response_is_gone(alice: openai.OpenAI) -> None:
    first = ask(alice)
    second = ask(alice, previous_response_id=first.id)
    alice.responses.delete(first.id)
    for use in (alice.responses.retrieve, alice.responses.delete):
        with pytest.raises(openai.NotFoundError):
            use(first.id)  # type: ignore[operator]
    with pytest.raises(openai.NotFoundError) as refused:
        ask(alice, previous_response_id=second.id)
    assert refused.value.param == "previous_response_id" and first.id in refused.value.message


def test_another_tenants_ids_are_unknown(alice: openai.OpenAI, bob: openai.OpenAI) -> None:
    theirs = ask(alice)
    for use in (bob.responses.retrieve, bob.responses.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            use(theirs.id)  # type: ignore[operator]
        unknown_id = "resp_" + "0" * 32
        with pytest.raises(openai.NotFoundError) as unknown:
            use(unknown_id)  # type: ignore[operator]
        assert refused.value.message.replace(theirs.id, "ID") == unknown.value.message.replace(unknown_id, "ID")
    with pytest.raises(openai.NotFoundError):
        ask(bob, previous_response_id=theirs.id)
    assert alice.responses.retrieve(theirs.id).id == theirs.id


@pytest.mark.parametrize("wish", [{"store": False}, {"extra_headers": {"x-agentspec-store": "off"}}])
def test_store_off_stores_no_response(alice: openai.OpenAI, wish: Any) -> None:
    answer = ask(alice, **wish)
    assert answer.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(answer.id)


def test_forgetting_covers_responses(alice: openai.OpenAI, running: Any) -> None:
    kept = ask(alice, extra_headers={"x-agentspec-session": "kept"})
    gone = ask(alice, extra_headers={"x-agentspec-session": "gone"})
    running.runtime.cache.forget(session="gone")
    assert alice.responses.retrieve(kept.id)
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(gone.id)


def test_two_gateways_share_a_database(gateway: Any, tmp_path: Path, closing: Any) -> None:
    settings = two_tenants(tmp_path, path=tmp_path / "cache")
    urls = [gateway({MODEL: FakeBackend(script)}, settings).url for _ in range(2)]
    one, other = (closing(openai.OpenAI(base_url=f"{url}/v1", api_key="key-of-alice", max_retries=0)) for url in urls)
    first = ask(one)
    second = ask(other, "more", previous_response_id=first.id)
    assert one.responses.retrieve(second.id).previous_response_id == first.id
    other.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(first.id)


@pytest.mark.parametrize("id", ["%00", "x" * 200, "%FF", "a%20b", "%F0%9F%99%82", "..%2F..", "resp_1"])
def test_unknown_ids_are_not_found(running: Any, id: str) -> None:
    headers = {"authorization": "Bearer key-of-alice"}
    for method in ("GET", "DELETE"):
        assert HTTP.request(method, f"{running.url}/v1/responses/{id}", headers=headers).status_code == 404
    body = {"model": MODEL, "input": "hi", "previous_response_id": id.replace("%00", "\0")}
    assert HTTP.post(f"{running.url}/v1/responses", json=body, headers=headers).status_code in (400, 404)


def test_a_gateway_that_stores_nothing(gateway: Any, tmp_path: Path) -> None:
    running = gateway({MODEL: FakeBackend(script)}, two_tenants(tmp_path, store=False))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="key-of-alice", max_retries=0) as client:
        answer = ask(client)
        assert answer.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)


def test_conversations_are_bounded(alice: openai.OpenAI) -> None:
    many = [{"role": "user", "content": "x"}] * 1200
    last = ask(alice, many)
    assert ask(alice, "and?", previous_response_id=last.id).status == "completed"
    longer = ask(alice, many[:847], previous_response_id=last.id)
    with pytest.raises(openai.BadRequestError, match="too long"):
        ask(alice, previous_response_id=longer.id)


class BrokenStore:
    """A store whose database is gone."""

    def put(self, stored: Any) -> bool:
        raise CacheUnavailableError("the disk is full")


def test_an_answer_that_cannot_be_stored_says_so(gateway: Any) -> None:
    running = gateway({MODEL: FakeBackend(script)})
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
        assert client.responses.retrieve(ask(client).id).status == "completed", "without a database, in memory"
        running.runtime.cache._opened_state().responses = BrokenStore()  # no door leads to a full disk
        assert ask(client).to_dict()["store"] is False
        last = list(ask(client, stream=True))[-1]
        assert last.type == "response.completed" and last.response.to_dict()["store"] is False
