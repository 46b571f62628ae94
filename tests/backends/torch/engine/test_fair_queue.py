"""Who is served next."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.engine.fair_queue import MOST_FLOWS, FairQueue, ServiceCounters
from agentspec.backends.torch.engine.request import EngineRequest
from agentspec.types import GenerateRequest, Labels


def request(tenant: str = "a", session: str | None = None, priority: int = 0) -> EngineRequest:
    request = GenerateRequest("m", text="x", tenant=tenant, labels=Labels(session=session), priority=priority)
    return EngineRequest(request, [1], 1, frozenset(), None, lambda item: None)


def served(queue: FairQueue, count: int, cost: int = 100) -> list[EngineRequest]:
    order = []
    for _ in range(count):
        first = queue.first()
        assert first is not None
        queue.remove(first)
        queue.charge(first, cost)
        order.append(first)
    return order


@given(st.lists(st.integers(-2, 2), max_size=12))
def test_lower_priorities_go_first_and_equal_ones_in_order_of_arrival(priorities: list[int]) -> None:
    queue, requests = FairQueue(), [request(priority=priority) for priority in priorities]
    for each in requests:
        queue.push(each)
    assert len(queue) == len(requests)
    assert served(queue, len(requests)) == sorted(requests, key=lambda each: each.original.priority)
    assert queue.first() is None


def test_a_tenant_that_asks_much_does_not_hold_up_another() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.push(request("busy"))
    for _ in range(3):
        queue.push(request("modest"))
    assert Counter(each.original.tenant for each in served(queue, 6)) == {"busy": 3, "modest": 3}


def test_sessions_of_one_tenant_take_turns() -> None:
    queue = FairQueue()
    for session in ("x", "x", "x", "x", "y", "y"):
        queue.push(request(session=session))
    assert Counter(each.original.labels.session for each in served(queue, 4)) == {"x": 2, "y": 2}


def test_being_away_earns_no_credit() -> None:
    queue = FairQueue()
    queue.charge(request("worker"), 10_000)
    queue.push(request("worker"))
    queue.push(request("worker"))
    for _ in range(4):
        queue.push(request("newcomer"))
    assert Counter(each.original.tenant for each in served(queue, 4)) == {"worker": 2, "newcomer": 2}


def test_what_was_put_back_goes_on_before_anything_begins() -> None:
    queue = FairQueue()
    new, old = request(), request("heavy")
    queue.charge(old, 1000)
    queue.push(new)
    queue.push_preempted(old)
    assert served(queue, 2) == [old, new]


def test_what_was_cancelled_is_gone() -> None:
    queue = FairQueue()
    first, second = request(), request()
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    assert first not in queue and queue.first() is second
    queue.clear()
    assert len(queue) == 0


def test_service_remembers_a_bounded_number_of_flows() -> None:
    service = ServiceCounters()
    for flow in range(MOST_FLOWS + 10):
        service.charge(flow, 1)
    assert service.of(0) == 0 and service.of(MOST_FLOWS) == 1
