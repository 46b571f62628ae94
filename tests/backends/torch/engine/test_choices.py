from __future__ import annotations

from agentspec.backends.torch.engine.choices import Choices
from agentspec.types import Delta, Speculation, Usage


def end(usage: Usage, speculation: Speculation | None = None) -> Delta:
    return Delta(finish_reason="stop", usage=usage, speculation=speculation)


def test_the_totals_stand_on_the_last_end_and_count_the_prompt_once() -> None:
    choices = Choices(2)
    assert choices.add(Delta(text="a"), 0) == Delta(text="a") and choices.begun
    choices.running += 1
    assert choices.add(Delta(text="b"), 1) == Delta(text="b", index=1)
    first = choices.add(end(Usage(9, 2, 0, 1, 3), Speculation(5, 2, 3, 0.5)), 1)
    assert first == Delta(finish_reason="stop", index=1) and not choices.done and choices.running == 1
    last = choices.add(end(Usage(9, 4, 8, 2, 2), Speculation(1, 1, 1, 0.25)), 0)
    assert choices.done and last.usage == Usage(9, 6, 0, 3, 5)
    assert last.speculation == Speculation(6, 3, 4, 0.75)


def test_one_choice_passes_as_it_is() -> None:
    delta = end(Usage(3, 1))
    assert Choices(1).add(delta, 0) == delta
