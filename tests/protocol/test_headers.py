from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.protocol.headers import label_headers, read_labels, read_switch, strategy_headers
from agentspec.types import Labels

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(TEXT)
def test_labels_survive_the_header(label: str) -> None:
    headers = label_headers(Labels(session=label, step="s"))
    sent = headers["x-agentspec-session"]
    assert sent.isascii() and sent.isprintable() and sent == sent.strip() and unquote(sent) == label
    if label.isprintable():
        assert read_labels(headers) == Labels(session=label, step="s")


def test_switches_are_sent_when_off() -> None:
    assert label_headers(Labels()) == {}
    sent = label_headers(Labels(workflow="w", step="s"), speculation=False, store=False)
    assert sent == {
        "x-agentspec-workflow": "w",
        "x-agentspec-step": "s",
        "x-agentspec-speculation": "off",
        "x-agentspec-store": "off",
    }


def test_labels_and_switches_are_read() -> None:
    headers = {
        "x-agentspec-session": "s%C3%A9ssion%25",
        "x-agentspec-workflow": "",
        "x-agentspec-step": "write code",
        "x-agentspec-speculation": " OFF",
    }
    assert read_labels(headers) == Labels(session="séssion%", step="write code")
    assert not read_switch(headers, "speculation") and read_switch(headers, "store")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session", "x" * 257),
        ("workflow", "a%00b"),
        ("step", "%ff"),
        ("step", "a%0Ab"),
        ("speculation", "no"),
        ("store", "0"),
    ],
)
def test_bad_headers_are_named(name: str, value: str) -> None:
    headers = {f"x-agentspec-{name}": value}
    with pytest.raises(InvalidRequestError) as caught:
        read_labels(headers)
        read_switch(headers, name)
    assert caught.value.param == f"x-agentspec-{name}"


def test_a_lossy_strategy_is_announced_where_it_acts() -> None:
    assert strategy_headers("x; y=1", lossy=False, speculation=False) == {"x-agentspec-lossless": "x; y=1"}
    assert strategy_headers("x; y=1", lossy=True, speculation=True) == {"x-agentspec-lossy": "x; y=1"}
    assert strategy_headers("x; y=1", lossy=True, speculation=False) == {}
