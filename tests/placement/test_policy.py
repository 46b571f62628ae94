"""Round robin by weight, and the least loaded member."""

from __future__ import annotations

from collections import Counter

from agentspec.placement import Call, LeastLoaded, Member, RoundRobin


def test_round_robin_follows_the_weights():
    members = [Member("a", weight=3), Member("b")]
    policy = RoundRobin()
    chosen = [policy.choose(Call(), members).name for _ in range(40)]
    assert Counter(chosen) == {"a": 30, "b": 10}
    assert "aaaa" not in "".join(chosen)


def test_round_robin_goes_on_without_a_member_that_left():
    policy = RoundRobin()
    both = [Member("a"), Member("b")]
    for _ in range(3):
        policy.choose(Call(), both)
    policy.removed("a")
    assert {policy.choose(Call(), both[1:]).name for _ in range(3)} == {"b"}


def test_the_least_loaded_for_its_weight_is_chosen_and_the_freer_of_equals():
    members = [
        Member("a", in_flight=4),
        Member("b", weight=4, in_flight=8, kv_use=0.5),
        Member("c", waiting=2, kv_use=0.1),
    ]
    assert LeastLoaded().choose(Call(), members).name == "c"
    assert LeastLoaded().choose(Call(), members[:2]).name == "b"
