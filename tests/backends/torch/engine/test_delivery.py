"""From the computing thread to the event loop: deltas that arrive together are one, and totals stand on the last."""

from __future__ import annotations

from typing import Any

from agentspec.backends.torch.engine.choices import Choices
from agentspec.backends.torch.engine.delivery import join_deltas, joined
from agentspec.backends.torch.engine.sequence import EngineRequest
from agentspec.types import Delta, GenerateRequest, Prompt, SamplingParams, Speculation, TokenLogprob, Usage


def request_of() -> EngineRequest:
    original = GenerateRequest("m", token_ids=[1], sampling=SamplingParams())
    return EngineRequest(original, [1], 8, frozenset(), None, lambda item: None)


REQUESTS = [request_of() for _ in range(3)]


def test_a_joined_delta_equals_its_parts() -> None:
    entry = [TokenLogprob(n, str(n), -1.0) for n in range(3)]
    prompt = Prompt("p", (1,))
    sources: tuple[Any, ...] = ("of a", "of b")
    parts = [
        Delta("a", (1,), (entry[0],), prompt=prompt),
        Delta("", (2, 3), (entry[1],), token_sources=sources[:1]),
        Delta("b", (), (entry[2],), "stop", Usage(1, 3), token_sources=sources[1:]),
    ]
    whole = Delta("ab", (1, 2, 3), tuple(entry), "stop", Usage(1, 3), prompt=prompt, token_sources=sources)
    assert join_deltas(parts) == whole
    assert join_deltas(parts[:1]) is parts[0]
    error = ValueError()
    assert joined([(REQUESTS[0], parts[0]), (REQUESTS[0], error), (REQUESTS[1], parts[1])]) == [
        (REQUESTS[0], parts[0]),
        (REQUESTS[0], error),
    ]


def end(usage: Usage, speculation: Speculation | None = None) -> Delta:
    return Delta(finish_reason="stop", usage=usage, speculation=speculation)


def test_the_totals_stand_on_the_last_end_and_count_the_prompt_once() -> None:
    choices = Choices(2)
    assert choices.add(Delta(text="a"), 0) == Delta(text="a")
    assert choices.add(Delta(text="b"), 1) == Delta(text="b", index=1)
    first = choices.add(end(Usage(9, 2, 0, 1, 3), Speculation(5, 2, 3, 0.5)), 1)
    assert first == Delta(finish_reason="stop", index=1) and not choices.done
    last = choices.add(end(Usage(9, 4, 8, 2, 2), Speculation(1, 1, 1, 0.25)), 0)
    assert choices.done and last.usage == Usage(9, 6, 0, 3, 5)
    assert last.speculation == Speculation(6, 3, 4, 0.75)
