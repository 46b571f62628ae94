from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentspec import StepPolicy
from agentspec.errors import InvalidRequestError
from agentspec.protocol.headers import (
    label_headers,
    read_labels,
    read_policy,
    read_switch,
    refuse_misspelt,
    strategy_headers,
)
from agentspec.types import Labels

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("given", "near"),
    [("sesion", "session"), ("stor", "store"), ("speculaton", "speculation"), ("work-flow", "workflow"),
     ("deadline", "deadline-s")],
)  # fmt: skip
def test_a_name_that_is_nearly_one_of_ours_is_refused(given: str, near: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"did you mean 'x-agentspec-{near}'") as caught:
        refuse_misspelt(["accept", f"x-agentspec-{given}"])
    assert caught.value.param == f"x-agentspec-{given}"


def test_other_names_pass() -> None:
    ours = "lossy lossless member translated relayed-tenant tenant backend".split()
    known = [*label_headers(Labels("s", "w", "p"), speculation=False, store=False)]
    policy = StepPolicy(deadline_s=1, priority=1).headers()
    refuse_misspelt([*(f"x-agentspec-{name}" for name in ours), *known, *policy, "session"])


@given(TEXT, st.sampled_from(["", " "]))
@example(" ", " ")
@example("  Ann Lee  ", " ")
def test_labels_survive_the_header(label: str, keep: str) -> None:
    headers = label_headers(Labels(session=label, step="s"), keep=keep)
    sent = headers["x-agentspec-session"]
    assert sent.isascii() and sent.isprintable() and sent == sent.strip() and unquote(sent) == label
    if label.isprintable():
        assert read_labels(headers) == Labels(session=label, step="s")


def test_labels_and_switches() -> None:
    assert label_headers(Labels()) == {} and label_headers(Labels("a\ud800b")) == {"x-agentspec-session": "a?b"}
    off = label_headers(Labels(workflow="w"), speculation=False, store=False)
    switches = {f"x-agentspec-{name}": "off" for name in ("speculation", "store")}
    assert off == {"x-agentspec-workflow": "w", **switches}
    headers = {"x-agentspec-session": "s%C3%A9ssion%25", "x-agentspec-workflow": "", "x-agentspec-step": "write code"}
    assert read_labels(headers) == Labels(session="séssion%", step="write code")
    headers["x-agentspec-speculation"] = " OFF"
    assert not read_switch(headers, "speculation") and read_switch(headers, "store")


def test_a_lossy_strategy_is_announced_where_it_acts() -> None:
    assert strategy_headers("x; y=1", lossy=False, speculation=False) == {"x-agentspec-lossless": "x; y=1"}
    assert strategy_headers("x; y=1", lossy=True, speculation=True) == {"x-agentspec-lossy": "x; y=1"}
    assert strategy_headers("x; y=1", lossy=True, speculation=False) == {}


POLICIES = st.builds(
    StepPolicy,
    deadline_s=st.none() | st.integers(1, 10**9) | st.floats(1e-3, 1e6).map(lambda value: float(f"{value:.10g}")),
    priority=st.none() | st.integers(0, 2**31 - 1),
)


@given(POLICIES)
def test_a_policy_survives_its_headers(policy: StepPolicy) -> None:
    sent = policy.headers()
    assert all(value.isascii() and value.isprintable() for value in sent.values())
    assert read_policy(sent) == policy


@pytest.mark.parametrize(
    ("name", "value"),
    [("session", "x" * 257), ("workflow", "a%00b"), ("step", "%ff"), ("step", "a%0Ab"), ("speculation", "no"),
     ("store", "0"), ("priority", "-1"), ("priority", "1.5"), ("priority", "soon"), ("priority", str(2**31)),
     ("deadline-s", "0"), ("deadline-s", "nan"), ("deadline-s", "inf"), ("deadline-s", "tomorrow")],
)  # fmt: skip
def test_a_wrong_value_names_its_header(name: str, value: str) -> None:
    headers = {f"x-agentspec-{name}": value}
    with pytest.raises(InvalidRequestError, match=f"x-agentspec-{name}") as caught:
        read_labels(headers)
        read_policy(headers)
        read_switch(headers, name)
    assert caught.value.param == f"x-agentspec-{name}"


@pytest.mark.parametrize(
    "wrong",
    [{"priority": True}, {"priority": 1.0}, {"deadline_s": "1"}, {"deadline_s": 0}, {"store": "off"},
     {"speculation": 1}, {"model": ""}, {"model": 3}],
)  # fmt: skip
def test_a_policy_says_which_value_is_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        StepPolicy(**wrong)
    assert raised.value.param == next(iter(wrong))


def test_a_policy_inside_another() -> None:
    outer, inner = StepPolicy(model="m", priority=3, store=False), StepPolicy(priority=0, speculation=False)
    assert inner.inside(outer) == StepPolicy(model="m", priority=0, store=False, speculation=False)
