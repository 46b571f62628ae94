"""From the computing thread to the event loop: an answer's text, few wake-ups, bounded waiting, not a token lost."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.engine.choices import Choices
from agentspec.backends.torch.engine.delivery import join_deltas, joined
from agentspec.backends.torch.engine.sequence import AnswerText, EngineRequest
from agentspec.types import Delta, GenerateRequest, Prompt, SamplingParams, Speculation, TokenLogprob, Usage


def request_of() -> EngineRequest:
    original = GenerateRequest("m", token_ids=[1], sampling=SamplingParams())
    return EngineRequest(original, [1], 8, frozenset(), None, lambda item: None)


REQUESTS = [request_of() for _ in range(3)]


def test_a_joined_delta_is_what_its_parts_are() -> None:
    entry = [TokenLogprob(n, str(n), -1.0) for n in range(3)]
    prompt = Prompt("p", (1,))
    parts = [
        Delta("a", (1,), (entry[0],), prompt=prompt),
        Delta("", (2, 3), (entry[1],)),
        Delta("b", (), (entry[2],), "stop", Usage(1, 3)),
    ]
    whole = join_deltas(parts)
    assert whole == Delta("ab", (1, 2, 3), tuple(entry), "stop", Usage(1, 3), prompt=prompt)
    assert join_deltas(parts[:1]) is parts[0]
    error = ValueError()
    assert joined([(REQUESTS[0], parts[0]), (REQUESTS[0], error), (REQUESTS[1], parts[1])]) == [
        (REQUESTS[0], parts[0]),
        (REQUESTS[0], error),
    ]


END = 0


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


BYTES: Any = SimpleNamespace(decoder=lambda shown: decode_bytes)


def streamed(tokens: Sequence[int], max_tokens: int = 100, **sampling: Any) -> tuple[str, str | None, int]:
    original = GenerateRequest("m", text="", sampling=SamplingParams(**sampling))
    request = EngineRequest(original, [0x20], max_tokens, frozenset({END}), None, lambda item: None)
    answer, text = AnswerText(request, BYTES), ""
    for token in tokens:
        ended = answer.add(token)
        text += answer.take()
        if ended:
            break
    return text, answer.finish, answer.num_tokens


@given(st.text(alphabet="ab€", max_size=12), st.sampled_from(["a", "ab", "€b", "b€"]))
def test_text_ends_in_front_of_its_first_stop_string(text: str, stop: str) -> None:
    shown, finish, _ = streamed([*text.encode(), END], stop=(stop,))
    assert (shown, finish) == (text.partition(stop)[0], "stop")


def test_what_was_held_back_is_told_at_the_end() -> None:
    assert streamed([*b"go ST", END], stop=("STOP",))[0] == "go ST"
    assert streamed([0x61, 0xE2], max_tokens=2)[0] == "a\ufffd"


# Choices.


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
