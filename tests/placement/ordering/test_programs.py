"""Attained service, and the time that programs take after a step."""

from __future__ import annotations

import pytest

from agentspec.placement.ordering import Programs
from agentspec.placement.ordering.programs import Estimate


def _run(programs, name, began=0.0, waits=0.0):
    """A program of two calls of 2 s and 3 s with 1 s between them, which wait for `waits` each."""
    programs.sent(name, "flow", "plan", began)
    programs.served(name, waited=waits, seconds=2.0, at=began + waits + 2)
    programs.sent(name, "flow", "write", began + waits + 3)
    programs.served(name, waited=waits, seconds=3.0, at=began + 2 * waits + 6)


def test_attained_service_adds_up_until_the_program_ends():
    programs = Programs()
    assert programs.attained("a") == 0.0
    _run(programs, "a", waits=10.0)
    assert programs.attained("a") == 5.0
    programs.end("a")
    assert programs.attained("a") == 0.0
    assert programs.attained(None) == 0.0


@pytest.mark.parametrize("waits", [0.0, 10.0])
def test_the_time_left_after_each_step_is_learned_without_what_was_waited(waits):
    programs = Programs()
    for number in range(3):
        _run(programs, f"p{number}", 100.0 * number, waits)
        programs.end(f"p{number}")
    assert programs.remaining("flow", "plan").mean == pytest.approx(6.0)
    assert programs.remaining("flow", "write").mean == pytest.approx(3.0)
    assert programs.remaining("flow", "new step").mean == pytest.approx(4.5)
    assert programs.remaining("another", "plan") is None


def test_calls_that_are_never_served_teach_nothing_and_take_no_place():
    programs = Programs()
    for number in range(3):
        programs.sent("served", "flow", None, 10.0 * number)
        programs.forget("served", 10.0 * number)
        programs.sent("refused", "flow", None, 10.0 * number)
        programs.forget("refused", 10.0 * number)
    programs.sent("served", "flow", None, 40.0)
    programs.served("served", waited=0.0, seconds=5.0, at=45.0)
    programs.sent("served", "flow", "under way", 50.0)
    programs.sent("waiting", "flow", "under way", 50.0)
    for name in ("served", "refused", "waiting"):
        programs.end(name)
    assert programs.remaining("flow", "#0").mean == programs.remaining("flow", "").mean == 5.0
    assert (programs.remaining("flow", "#0").samples, programs.remaining("flow", "").samples) == (1, 1)


def test_programs_that_nobody_ends_are_learned_from_once_others_need_their_room():
    programs = Programs(most=1)
    _run(programs, "forgotten")
    assert programs.remaining("flow", "plan") is None
    programs.sent("next", "flow", "plan", 50.0)
    assert programs.remaining("flow", "plan").mean == pytest.approx(6.0)


def test_a_program_is_not_over_while_a_call_of_it_is_under_way():
    programs = Programs()
    programs.sent("long", "flow", "plan", 0.0)
    _run(programs, "idle")
    programs.sent("other", "flow", "plan", 400.0)
    programs.served("long", waited=0.0, seconds=450.0, at=450.0)
    assert (programs.attained("long"), programs.attained("idle")) == (450.0, 0.0)
    programs.sent("other", "flow", "write", 800.0)
    assert programs.attained("long") == 0.0


def test_steps_without_a_name_are_told_apart_by_their_place():
    programs = Programs()
    for at in (0.0, 4.0, 8.0):
        programs.sent("p", "flow", None, at)
        programs.served("p", waited=0.0, seconds=1.0, at=at + 1)
    programs.end("p")
    assert programs.urgency("q", "flow", None, 100.0).start_by == pytest.approx(100.0 - 9.0)
    programs.sent("q", "flow", None, 0.0)
    programs.sent("q", "flow", None, 1.0)
    assert programs.urgency("q", "flow", None, 100.0).start_by == pytest.approx(100.0 - 5.0)


def test_a_call_should_start_as_early_as_its_program_is_long():
    programs = Programs()
    for number in range(3):
        _run(programs, f"p{number}")
        programs.end(f"p{number}")
    urgency = programs.urgency("new", "flow", "plan", 20.0)
    assert (urgency.attained, urgency.start_by, urgency.lost_after) == pytest.approx((0.0, 14.0, 14.0))
    assert programs.urgency("new", "flow", "plan", None).start_by is None


def test_an_estimate_is_the_mean_of_few_and_follows_when_there_are_many():
    estimate = Estimate()
    for value in (2.0, 4.0, 6.0):
        estimate.observe(value)
    assert estimate.mean == pytest.approx(4.0)
    assert estimate.deviation == pytest.approx(5 / 3, rel=0.2)
    assert estimate.least == pytest.approx(4.0 - 2 * estimate.deviation)
    for _ in range(1000):
        estimate.observe(50.0)
    assert estimate.mean == pytest.approx(50.0, rel=0.01)
    assert estimate.deviation < 1.0
