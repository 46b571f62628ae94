from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.proxy.admission.identity import SOURCES, identified
from agentspec.types import Labels

CLAUDE = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s-1"})


@pytest.mark.parametrize(
    ("headers", "fields", "labels"),
    [
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, {}, Labels("s", None, "a")),
        ({"session-id": "s"}, {}, Labels("s")),
        ({"session_id": "s"}, {}, Labels("s")),
        ({"x-session-id": "s"}, {}, Labels("s")),
        ({"x-session-affinity": "s"}, {}, Labels("s")),
        ({"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, {}, Labels("s", "p")),
        ({}, {"session_id": "s"}, Labels("s")),
        ({}, {"prompt_cache_key": "s"}, Labels("s")),
        ({}, {"previous_response_id": "resp_1"}, Labels("resp_1")),
        ({}, {"metadata": {"user_id": "u"}}, Labels("u")),
        ({}, {"metadata": {"user_id": CLAUDE}}, Labels("s-1")),
        ({}, {"metadata": {"user_id": "user_1_account__session_s-1"}}, Labels("s-1")),
        ({}, {"metadata": {"user_id": "{not json"}}, Labels("{not json")),
        ({}, {"metadata": {"thread_id": "t", "user_id": "u"}}, Labels("t")),
        ({"x-session-id": "h"}, {"session_id": "b", "prompt_cache_key": "k"}, Labels("h")),
        ({}, {}, Labels()),
    ],
)
def test_what_agents_send(headers: dict[str, str], fields: dict[str, Any], labels: Labels) -> None:
    assert identified(Labels(), headers, fields) == labels


def test_our_own_labels_count_first() -> None:
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    assert identified(Labels("mine", "flow"), headers, {}) == Labels("mine", "flow", "a")


@pytest.mark.parametrize("odd", ["", " ", 5, None, [], {"a": 1}, "x" * 5000])
def test_what_is_no_name_is_none(odd: Any) -> None:
    fields = {"session_id": odd, "metadata": {"user_id": odd}, "prompt_cache_key": odd}
    assert identified(Labels(), {}, fields) == Labels()
    assert identified(Labels(), {}, {"metadata": odd}) == Labels()


def test_a_name_that_no_label_may_be_is_replaced_by_its_digest() -> None:
    long, broken = (identified(Labels(), {}, {"session_id": name}).session for name in ("x" * 300, "a\nb"))
    assert long is not None and broken is not None and len(long) == len(broken) == 64 and long != broken


def test_every_source_names_one_place_and_one_label() -> None:
    assert all(bool(source.header) != bool(source.field) for source in SOURCES)
    assert {source.label for source in SOURCES} == {"session", "workflow", "step"}
    assert all(source.header == source.header.lower() for source in SOURCES)
