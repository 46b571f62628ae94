"""From the computing thread to the event loop: an answer's text, few wake-ups, bounded waiting, not a token lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.engine.delivery import MOST_ITEMS, Choices, Inbox, join_deltas, joined
from agentspec.backends.torch.engine.sequence import AnswerText, EngineRequest
from agentspec.types import Delta, GenerateRequest, Prompt, SamplingParams, Speculation, TokenLogprob, Usage


def request_of() -> EngineRequest:
    original = GenerateRequest("m", token_ids=[1], sampling=SamplingParams())
    return EngineRequest(original, [1], 8, frozenset(), None, lambda item: None)


REQUESTS = [request_of() for _ in range(3)]


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3)), max_size=300), st.integers(0, 300))
def test_what_waits_is_joined_and_nothing_is_lost(told: list[tuple[int, str]], ends: int) -> None:
    async def play() -> None:
        inbox = Inbox()
        for number, (choice, text) in enumerate(told):
            assert inbox.put(REQUESTS[choice], Delta(text=text, token_ids=(number,)))
            assert len(inbox._items) <= MOST_ITEMS
        assert not told or ends or inbox.put(REQUESTS[0], ValueError("x"))
        items = await inbox.get() if told else []
        if told and not ends:
            assert isinstance(items.pop()[1], ValueError)
        for request, delta in items:
            mine = [(number, text) for number, (choice, text) in enumerate(told) if REQUESTS[choice] is request]
            assert isinstance(delta, Delta)
            assert delta.text == "".join(text for _, text in mine)
            assert delta.token_ids == tuple(number for number, _ in mine)
        assert len({id(request) for request, _ in items}) == len(items) and len(inbox._items) == 0

    asyncio.run(play())


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


def test_a_closed_loop_says_so() -> None:
    async def make() -> Inbox:
        return Inbox()

    inbox = asyncio.run(make())
    assert not inbox.put(REQUESTS[0], Delta("x"))


@pytest.mark.anyio
async def test_a_reader_that_stops_reading_holds_its_answer_once(saved_model: Path, monkeypatch: Any) -> None:
    """The engine finishes an answer that nobody reads; its text waits in few pieces, and is whole when it is read."""
    made: list[Inbox] = []
    begin = Inbox.__init__
    monkeypatch.setattr(Inbox, "__init__", lambda inbox: (made.append(inbox), begin(inbox))[1])
    backend = TorchBackend.load(TorchSettings(model=str(saved_model), device="cpu"))
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True)
    request = GenerateRequest("m", token_ids=[1, 2, 3], sampling=sampling)
    want = [token async for delta in backend.generate(request) for token in delta.token_ids]
    answer = backend.generate(request)
    got = list((await anext(answer)).token_ids)
    while backend.stats().active or backend.stats().queued:
        await asyncio.sleep(0.01)
    assert 1 <= len(made[-1]._items) <= MOST_ITEMS
    rest = [delta async for delta in answer]
    assert len(rest) <= 2 and got + [token for delta in rest for token in delta.token_ids] == want
    await backend.aclose()


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


def test_a_stop_string_may_be_found_only_in_what_was_held_back() -> None:
    assert streamed([0x61, 0xE2], max_tokens=2, stop=("\ufffd",)) == ("a", "stop", 2)
    assert streamed([0x61, 0xE2], max_tokens=2, min_tokens=2, stop=("\ufffd",)) == ("a\ufffd", "length", 2)


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
