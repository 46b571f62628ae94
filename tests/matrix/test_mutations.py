"""Every guard that features of a request share is needed: with any one of them broken, some case of the matrix fails.

A mutation names a function, one expression or statement of it, which has to be there, and the cases that are tried.
`make mutants` breaks one after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.matrix import test_matrix
from tests.matrix.conftest import worlds
from tests.mutation import function_at, mutant_of

MOST_CASES = 40
PROXY = "agentspec.proxy"
UPSTREAM = "agentspec.backends.openai.upstream:Upstream"
Where = dict[str, Any]
# what breaks: the function, what to change, changed, and the cases in which it has to show
MUTATIONS: dict[str, tuple[str, str, str, Where]] = {
    "tenant forgotten": (
        f"{PROXY}.request_context:RequestContext.complete",
        "tenant=self.tenant",
        "tenant='default'",
        {"backend": "engine", "keyed": True},
    ),
    "stored though off": (
        f"{PROXY}.request_context:RequestContext.complete",
        "store=self.store",
        "store=True",
        {"backend": "engine", "store": False},
    ),
    "switches not passed on": (
        f"{PROXY}.forwarding:upstream_body",
        "asked, context.off",
        "asked, ()",
        {"backend": "upstream"},
    ),
    "client's name of the model passed on": (
        f"{PROXY}.forwarding:upstream_body",
        "added if model == fields['model'] else {**added, 'model': model}",
        "added",
        {"api": "chat", "backend": "upstream"},
    ),
    "gateway's key passed on": (
        f"{PROXY}.request_context:upstream_headers",
        "if answer.has_gateway_key:",
        "if False:",
        {"backend": "native", "keyed": True},
    ),
    "no salt": (
        "agentspec.backends.openai.isolation:TenantIsolation.salts",
        "return salted",
        "return {}",
        {"backend": "upstream", "keyed": True},
    ),
    "session's own name passed on": (
        "agentspec.backends.openai.isolation:TenantIsolation.labels",
        "self._digest('session', tenant, labels.session)",
        "labels.session",
        {"backend": "upstream", "keyed": True, "labels": True},
    ),
    "labels not passed on": (
        f"{UPSTREAM}.body_fields",
        "labels.session or own.session, labels.workflow or own.workflow, labels.step",
        "None, None, None",
        {"backend": "upstream", "keyed": True, "labels": True},
    ),
    "account shown": (
        f"{PROXY}.forwarding:_error_body",
        "without_account(body) if response.own_key else body",
        "body",
        {"api": "chat", "backend": "upstream", "ending": "error"},
    ),
    "length not passed on": (
        "agentspec.protocol.anthropic.requests:parse_messages",
        "'messages': messages, 'max_tokens': fields.max_tokens}",
        "'messages': messages}",
        {"api": "messages", "backend": "upstream"},
    ),
    "client's leaving unnoticed": (
        f"{PROXY}.admission:_end_with",
        "block.reschedule(asyncio.get_running_loop().time())",
        "pass",
        {"backend": "upstream", "ending": "disconnect"},
    ),
    "client's leaving counted as an answer": (
        f"{PROXY}.middleware:GatewayMiddleware._handle",
        "if not answer.body_ended:",
        "if False:",
        {"backend": "scripted", "ending": "disconnect"},
    ),
    "no deadline": (
        f"{PROXY}.admission:Deadline.limit",
        "asyncio.timeout_at(self.at)",
        "asyncio.timeout(20)",
        {"backend": "scripted", "ending": "deadline"},
    ),
    "cut stream passed as whole": (
        f"{PROXY}.forwarding:_send_stream",
        "if not inspector.finished:",
        "if False:",
        {"backend": "native", "ending": "cut", "stream": True},
    ),
    "cut answer of an upstream's chat taken as whole": (
        "agentspec.backends.openai.backend:OpenAIBackend.deltas",
        "if last is None or last.finish_reason == 'cancelled':",
        "if last is None:\n            last = Delta(finish_reason='stop')\n    if False:",
        {"api": "messages", "ending": "cut", "stream": True},
    ),
    "no event for an error": (
        f"{PROXY}.answering:Sending._send_events",
        "await self._send_chunks([writer.failed(message, known.status, answer.request_id)])",
        "pass",
        {"backend": "scripted", "ending": "cut", "stream": True},
    ),
    "error of a stream not counted": (
        f"{PROXY}.answer:RequestAnswer.interrupt",
        "self.fail(outcome(error), error_response(error).code)",
        "pass",
        {"backend": "scripted", "ending": "cut", "stream": True},
    ),
    "usage not counted": (
        f"{PROXY}.answer:RequestAnswer.count",
        "self.usage = delta.usage or self.usage",
        "pass",
        {"ending": "complete"},
    ),
    "usage counted twice": (
        f"{PROXY}.answer:RequestAnswer.finish",
        "metrics.tokens(self.model, prompt=usage.prompt_tokens, completion=usage.completion_tokens)",
        "metrics.tokens(self.model, prompt=usage.prompt_tokens, completion=2 * usage.completion_tokens)",
        {"ending": "complete"},
    ),
    "slot not given back": (
        f"{PROXY}.admission:Slots.give_back",
        "tenant.running -= 1",
        "pass",
        {"backend": "upstream"},
    ),
    "response stored though off": (
        f"{PROXY}.responses.api:_writer",
        "request.store and 'store' not in context.off",
        "request.store",
        {"api": "responses", "backend": "scripted", "store": False},
    ),
    "response read by anyone": (
        "agentspec.cache.response_store:ResponseStore._mine",
        "self._table.c.tenant == tenant",
        "self._table.c.tenant != ''",
        {"api": "responses", "keyed": True},
    ),
    "thoughts dropped from whole answers": (
        "agentspec.protocol.responses:Choice.add",
        "self._texts.setdefault(name, []).append(value)",
        "pass",
        {"api": "chat", "content": "thoughts", "ending": "complete"},
    ),
    "text cut in whole answers": (
        "agentspec.protocol.responses:Choice.add",
        "self.text.append(delta.text)",
        "self.text = [delta.text or ''.join(self.text)]",
        {"backend": "scripted", "content": "plain"},
    ),
    "answer without its id": (
        f"{PROXY}.answer:RequestAnswer._headers",
        "yield (b'x-request-id', self.request_id.encode())",
        "pass",
        {"ending": "complete"},
    ),
}


def fails(case: Any, world: Any) -> bool:
    try:
        test_matrix.test_a_request(world, case)
    except Exception:  # also of readers that cannot take what came
        return True
    return False


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_guard_is_noticed(
    name: str, tiny_model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, old, new, where = MUTATIONS[name]
    tried = [case for case in test_matrix.CASES if all(getattr(case, axis) == value for axis, value in where.items())]
    function = function_at(place)
    with worlds(tiny_model, corpus, tmp_path) as world:
        monkeypatch.setattr(function, "__code__", mutant_of(function, old, new))
        assert any(fails(case, world) for case in tried[:MOST_CASES])
        monkeypatch.undo()


def test_each_guard_is_where_its_mutation_says() -> None:
    for place, old, new, where in MUTATIONS.values():
        mutant_of(function_at(place), old, new)
        assert any(all(getattr(case, axis) == value for axis, value in where.items()) for case in test_matrix.CASES)
