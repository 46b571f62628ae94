"""Where features of a request meet: some 150 requests that cover all pairs, each held to what every answer promises."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.matrix.apis import VALUE, Answer, most_tokens
from tests.matrix.cases import FORWARDED, STRATEGIES, Case, cases, other_way
from tests.matrix.conftest import LABELS, TENANTS, World, wait_for
from tests.matrix.models import ACCOUNT_KEY, THOUGHTS, WORDS

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_request(world: Any, case: Case) -> None:
    here = world(case)
    before, stored = Counts(here, case), here.stored()
    sent = {name: len(one.bodies) for name, one in here.upstreams.items()}
    answer = here.ask(case)
    check_end(case, answer)
    before.check(here, case, answer)
    if case.backend in FORWARDED:
        bodies = [one for name, script in here.upstreams.items() for one in script.bodies[sent[name] :]]
        retried = case.backend == "pool" and case.ending == "error"  # a broken answer is not asked for again
        assert len(bodies) in ((1, 2, 3) if retried else (0, 1) if case.ending == "deadline" else (1,))
        for one in bodies:
            check_sent(case, *one)
    if case.backend == "engine" and not case.refused:
        check_stored(case, here, stored[0])
    if case.whole and not case.refused:
        assert_same(answer, here.ask(other_way(case)), case)
    if case.api == "responses" and answer.ended:
        check_kept(here, case, answer.id)


class Counts:
    """What was counted before a case."""

    def __init__(self, here: World, case: Case) -> None:
        self._before, self._cancelled = here.settled(), here.cancelled(case.backend)

    def check(self, here: World, case: Case, answer: Answer) -> None:
        """The request is counted once, by how it ended, and its tokens are charged once, to its tenant."""
        after, before = here.settled(), self._before
        rise = Counter({key: after[key] - before[key] for key in after if after[key] != before[key]})
        outcomes = {key[-1]: rise[key] for key in rise if key[0] == "agentspec_requests_total"}
        assert outcomes == {outcome_of(case): 1}
        kinds = ("prompt", "completion")
        charged = tuple(rise[f"agentspec_{kind}_tokens_total", case.backend] for kind in kinds)
        tenants = {name: tuple(rise["agentspec_tenant_tokens_total", name, kind] for kind in kinds) for name in TENANTS}
        if answer.usage is not None:
            assert charged == answer.usage
            assert tenants["alice"] == (answer.usage if case.keyed else (0, 0))
        assert tenants["bob"] == (0, 0)
        assert not any(after[key] for key in after if key[0] == "agentspec_tenant_running")
        assert not case.refused or charged == (0, 0)
        if case.ending == "disconnect" and case.backend != "engine":
            wait_for(lambda: here.cancelled(case.backend) > self._cancelled)
        wait_for(lambda: not here.active())


def outcome_of(case: Case) -> str:
    if case.refused:
        return "client_error"
    if case.ending == "error":
        return "client_error" if case.backend in FORWARDED else "server_error"
    return {"disconnect": "cancelled", "cut": "server_error", "deadline": "server_error"}.get(case.ending, "ok")


def check_end(case: Case, answer: Answer) -> None:
    """The status, the content and the end of what the client got."""
    if case.ending == "disconnect" and not case.refused:
        return
    if case.refused:
        assert answer.status == 400 and answer.error
    elif not case.whole:
        early = case.stream and answer.status == 200  # the stream had begun: an event reports the error
        assert early or answer.status == status_of(case)
        assert answer.error and not (case.own_key and ACCOUNT_KEY in answer.error)
        assert answer.ended in (None, "failed")
    else:
        assert (answer.status, answer.error) == (200, None)
        check_content(case, answer)


def status_of(case: Case) -> int:
    """The status of an answer that failed before any of it arrived."""
    if case.ending == "error" and case.backend in FORWARDED:
        return 429
    return 504 if case.ending == "deadline" else 502


def check_content(case: Case, answer: Answer) -> None:
    if case.ending == "length" and case.backend != "retrieval":
        assert answer.ended in ("length", "incomplete", "max_tokens")
    assert answer.usage is not None and min(answer.usage) > 0
    if case.content == "structured":
        assert json.loads(answer.text) == VALUE
    if case.backend in ("engine", *STRATEGIES):
        return
    if case.content == "tools":
        assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [("pick", VALUE)]
    elif case.content != "structured":
        words = "".join(WORDS)
        assert answer.text == words if case.ending == "complete" or case.backend in FORWARDED else words[:1] in "a"
    assert answer.thoughts == ("".join(THOUGHTS) if case.content == "thoughts" else "")


def assert_same(one: Answer, other: Answer, case: Case) -> None:
    """Streamed or whole, the answer is the same."""
    assert (one.text, one.thoughts, one.ended) == (other.text, other.thoughts, other.ended)
    assert [(name, json.loads(text)) for name, text in one.calls] == [(n, json.loads(t)) for n, t in other.calls]
    assert one.usage == other.usage


def check_sent(case: Case, path: str, headers: dict[str, str], body: dict[str, Any]) -> None:
    """What an upstream is sent about the caller, and what it is not."""
    assert body["model"] == "theirs"
    most = next(body[name] for name in ("max_tokens", "max_output_tokens") if name in body)
    assert most == most_tokens(case)
    given = headers.get("authorization", "")
    assert given == (f"Bearer {ACCOUNT_KEY}" if case.own_key else "")  # the gateway's keys stay here
    assert not any(f"key-of-{tenant}" in json.dumps([headers, body]) for tenant in TENANTS)
    assert bool(body.get("cache_salt")) == case.keyed
    sent = body.get("vllm_xargs", {})
    off = [name for name in ("store", "speculation") if sent.get(f"agentspec_{name}") == "off"]
    if path != "messages":
        assert off == [name for name in ("store", "speculation") if not getattr(case, name)]
    session = headers.get("x-agentspec-session") if path == "messages" else sent.get("agentspec_session")
    assert bool(session) == case.labels
    if case.labels:
        assert (session == LABELS["x-agentspec-session"]) == (not case.keyed)  # a tenant's own name for it


def check_stored(case: Case, here: World, before: int) -> None:
    """The engine's cache holds the answer for its tenant, unless storing is off or it was not read to its end."""
    tokens, tenants = here.stored()
    assert tenants <= {"alice" if case.keyed else "default"}
    if case.ending != "disconnect" or not case.store:
        assert (tokens > before) == case.store


def check_kept(here: World, case: Case, id: str) -> None:
    """A finished response can be read again by its tenant alone, unless storing is off."""
    mine = here.get(f"/v1/responses/{id}", TENANTS[0]).status_code if case.backend != "native" else 404
    assert mine == (200 if case.backend != "native" and case.store and case.whole else 404)
    if case.keyed:
        assert here.get(f"/v1/responses/{id}", TENANTS[1]).status_code == 404
