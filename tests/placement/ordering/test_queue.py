"""Orders of waiting calls: nothing lost, the urgent first, and nobody overtaken for longer than is promised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.placement.ordering import ArrivalOrder, Urgency, UrgencyOrder

PATIENCE = 10.0
URGENCIES = st.builds(
    lambda attained, start_by, late: Urgency(attained, start_by, float("inf") if start_by is None else start_by + late),
    st.sampled_from([0.0, 0.5, 3.0, 100.0]),
    st.none() | st.floats(-50, 150),
    st.floats(0, 5),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "pop", "remove"]), URGENCIES, st.floats(0, 8), st.booleans()),
    max_size=60,
)


@pytest.mark.parametrize("order", [ArrivalOrder, lambda: UrgencyOrder(PATIENCE)], ids=["arrival", "urgency"])
@given(STEPS)
def test_every_call_comes_out_once_unless_it_left(order, steps):
    queue, inside, now = order(), set(), 0.0
    for number, (what, urgency, passed, pressed) in enumerate(steps):
        now += passed
        if what == "push":
            queue.push(number, urgency, now)
            inside.add(number)
        elif what == "remove":
            assert queue.remove(number % 7) == (number % 7 in inside)
            inside.discard(number % 7)
        elif inside:
            inside.remove(queue.pop(now, pressed=pressed))
        assert len(queue) == len(inside)
    while inside:
        inside.remove(queue.pop(now))
    with pytest.raises(IndexError):
        queue.pop(now)


@given(STEPS)
def test_nobody_is_overtaken_by_what_came_much_later(steps):
    queue, came, now, ever_pressed = UrgencyOrder(PATIENCE), {}, 0.0, False
    for number, (what, urgency, passed, pressed) in enumerate(steps):
        now += passed
        if what != "pop":
            queue.push(number, urgency, now)
            came[number] = now
        elif came:
            ever_pressed |= pressed
            served = came.pop(queue.pop(now, pressed=pressed))
            bound = 2 * PATIENCE if ever_pressed else PATIENCE
            assert all(served <= other + bound + 1e-9 for other in came.values())


def test_the_least_slack_goes_first_and_a_lost_deadline_makes_way():
    queue = UrgencyOrder(PATIENCE)
    queue.push("lost", Urgency(1.0, start_by=1.0, lost_after=2.0), 0.0)
    queue.push("loose", Urgency(1.0, start_by=8.0), 0.0)
    queue.push("tight", Urgency(1.0, start_by=4.0), 0.0)
    assert [queue.pop(3.0) for _ in range(3)] == ["tight", "loose", "lost"]


def test_programs_with_less_service_go_first_but_waiting_makes_up_for_it():
    queue = UrgencyOrder(PATIENCE)
    queue.push("served for long", Urgency(5.0), 0.0)
    queue.push("served briefly", Urgency(1.0), 0.5)
    queue.push("new, later", Urgency(0.0), 6.0)
    assert [queue.pop(6.0) for _ in range(3)] == ["served briefly", "served for long", "new, later"]


@given(STEPS)
def test_under_pressure_no_new_program_passes_one_that_has_begun_unless_it_waited_long(steps):
    queue, waiting, now = UrgencyOrder(PATIENCE), {}, 0.0
    rest = [("pop", None, 0.5, True)] * len(steps)  # all that are left
    for number, (what, urgency, passed, _) in enumerate([*steps, *rest]):
        now += passed
        if what != "pop":
            queue.push(number, urgency, now)
            waiting[number] = (urgency.attained > 0, now)
        elif waiting:
            begun, came = waiting.pop(queue.pop(now, pressed=True))
            others_begun = [one for one, _ in waiting.values() if one]
            assert begun or not others_begun or now - came >= PATIENCE - 1e-9


@given(st.integers(1, 5), st.integers(1, 4))
def test_under_pressure_a_new_program_is_served_within_a_bounded_number_of_services(came_a_second, start):
    """However many calls of running programs keep coming: as many as come within twice the patience, and no more."""
    queue, served = UrgencyOrder(PATIENCE), 0
    queue.push("new", Urgency(), 0.0)
    for second in range(start, 100):
        for number in range(came_a_second):
            queue.push((second, number), Urgency(1.0), float(second))
        for _ in range(came_a_second):  # what comes is served, so that some call is always there
            served += 1
            if queue.pop(float(second), pressed=True) == "new":
                assert served <= 2 * PATIENCE * came_a_second + 1
                return
    raise AssertionError("never served")


def test_under_pressure_what_has_begun_goes_first():
    for pressed, first in ((False, "new"), (True, "begun")):
        queue = UrgencyOrder(PATIENCE)
        queue.push("new", Urgency(), 0.0)
        queue.push("begun", Urgency(3.0), 0.0)
        assert queue.pop(1.0, pressed=pressed) == first


def test_patience_has_to_be_positive():
    with pytest.raises(ValueError, match="patience"):
        UrgencyOrder(0)
