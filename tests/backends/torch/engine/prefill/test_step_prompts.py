"""What is learned of a workflow's steps: which one follows, in memory that has a bound."""

from __future__ import annotations

from agentspec.backends.torch.engine.prefill.step_prompts import MOST_COUNTS, MOST_STEPS, StepPrompts
from agentspec.backends.torch.engine.request import EngineRequest
from agentspec.types import GenerateRequest, Labels

PLAN, WRITE = list(range(100, 150)), list(range(300, 370))


def request(step: str, session: str, prompt: list[int]) -> EngineRequest:
    original = GenerateRequest("m", token_ids=prompt, labels=Labels(session, "flow", step))
    return EngineRequest(original, prompt, 1, frozenset(), None, lambda item: None)


def test_steps_of_ever_new_names_are_forgotten_and_the_usual_one_stays_expected() -> None:
    steps = StepPrompts()
    for turn in range(3 * MOST_STEPS):
        steps.ended(request("plan", f"s{turn}", [*PLAN, turn]))
        steps.ended(request(f"odd {turn}" if turn % 2 else "write", f"s{turn}", [*WRITE, turn]))
    assert len(steps._steps) <= MOST_STEPS and len(steps._places) <= MOST_STEPS
    assert all(record.followers.total() <= MOST_COUNTS for record in steps._steps.values())
    assert steps.ended(request("plan", "last", [*PLAN, 1])) == WRITE


def test_what_followed_of_late_counts_more_than_what_followed_long_ago() -> None:
    steps = StepPrompts()
    for turn in range(4 * MOST_COUNTS):
        steps.ended(request("plan", f"s{turn}", [*PLAN, turn]))
        steps.ended(request("write", f"s{turn}", [*WRITE, turn]))
    for turn in range(MOST_COUNTS):
        steps.ended(request("plan", f"t{turn}", [*PLAN, turn]))
        steps.ended(request("test", f"t{turn}", [*PLAN, *WRITE, turn]))
    assert steps.ended(request("plan", "last", [*PLAN, 1])) == [*PLAN, *WRITE]
