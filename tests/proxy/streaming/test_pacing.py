from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import EngineError
from agentspec.proxy.streaming.pacing import MOST_HELD, Pacer, paced
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Delta, Speculation, TokenLogprob, Usage

TICK = 0.001


def drain(pacer: Pacer) -> list[Delta]:
    out: list[Delta] = []
    while not pacer.finished:
        out += pacer.tick()
    return out


def paced_texts(pieces: list[str], characters: int = 4) -> list[str]:
    pacer = Pacer(characters)
    for piece in pieces:
        pacer.add(Delta(text=piece, token_ids=(1,)))
    pacer.add(Delta(finish_reason="stop"))
    pacer.complete = True
    return [delta.text for delta in drain(pacer)]


@given(st.text(max_size=60), st.data())
def test_the_pieces_depend_on_the_text_alone(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert paced_texts(pieces) == paced_texts([text])
    assert "".join(paced_texts(pieces)) == text
    assert all(len(piece) == 4 for piece in paced_texts(pieces)[:-2])


def test_a_piece_waits_until_it_is_whole() -> None:
    pacer = Pacer(4)
    pacer.add(Delta(text="abc"))
    assert pacer.tick() == [Delta()]
    pacer.add(Delta(text="de"))
    assert [delta.text for delta in pacer.tick()] == ["abcd"]
    assert pacer.tick() == [Delta()]
    pacer.add(Delta(finish_reason="stop", usage=Usage(3, 5)))
    assert [delta.text for delta in pacer.tick()] == ["e"]
    assert pacer.tick() == [Delta()]  # whether further choices follow is not known yet
    pacer.complete = True
    assert pacer.tick() == [Delta(finish_reason="stop", usage=Usage(3, 5))] and pacer.finished


def test_thoughts_are_cut_apart_from_the_text() -> None:
    pacer = Pacer(4)
    for piece in ("so I", " think"):
        pacer.add(Delta(extra={"reasoning": piece, "reasoning_content": piece}))
    pacer.add(Delta(text="yes"))
    pacer.add(Delta(finish_reason="stop"))
    pacer.complete = True
    sent = drain(pacer)
    assert [delta.extra.get("reasoning", delta.text) for delta in sent] == ["so I", " thi", "nk", "yes", ""]
    assert all(set(delta.extra) in ({"reasoning", "reasoning_content"}, set()) for delta in sent)


def test_what_cannot_be_cut_stays_whole_and_in_order() -> None:
    call = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    scored = Delta(text="abcdefgh", logprobs=(TokenLogprob(1, "abcdefgh", -1.0),))
    pacer = Pacer(4)
    for delta in (Delta(text="first"), Delta(extra=call), scored, Delta(text="x"), Delta(finish_reason="tool_calls")):
        pacer.add(delta)
    pacer.complete = True
    assert drain(pacer) == [
        Delta(text="firs"),
        Delta(text="t"),
        Delta(extra=call),
        scored,
        Delta(text="x"),
        Delta(finish_reason="tool_calls"),
    ]


def test_token_ids_are_kept_whole_where_they_are_sent() -> None:
    pacer = Pacer(4, token_ids=True)
    pacer.add(Delta(text="longer than four", token_ids=(1, 2, 3)))
    assert pacer.tick() == [Delta(text="longer than four", token_ids=(1, 2, 3))]


def test_the_totals_come_with_the_last_choice_to_be_sent() -> None:
    """It need not be the one that was generated last."""
    pacer, totals = Pacer(4), Usage(1, 9)
    done = Speculation(drafted=1)
    pacer.add(Delta(text="a long first choice", index=0))
    pacer.add(Delta(text="2nd", index=1))
    pacer.add(Delta(finish_reason="length", index=0))
    pacer.add(Delta(finish_reason="stop", index=1, usage=totals, speculation=done))
    pacer.complete = True
    sent = drain(pacer)
    assert [delta.index for delta in sent if delta.finish_reason] == [1, 0]
    assert [(delta.usage, delta.speculation) for delta in sent if delta.finish_reason] == [(None, None), (totals, done)]
    assert "".join(delta.text for delta in sent if delta.index == 0) == "a long first choice"


async def source(*items: Delta | Exception, closed: list[bool] | None = None) -> AsyncGenerator[Delta]:
    try:
        for item in items:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        if closed is not None:
            closed.append(True)


@pytest.mark.anyio
async def test_an_error_comes_after_what_was_said_before_it() -> None:
    said: list[str] = []
    with pytest.raises(EngineError):
        async for delta in paced(source(Delta(text="abcdef"), EngineError("broke")), TICK, 4):
            said.append(delta.text)
    assert said == ["abcd", "ef"]
    with pytest.raises(EngineError):
        await anext(paced(source(EngineError("broke")), TICK, 4))
    assert [delta async for delta in paced(source(), TICK, 4)] == []


@pytest.mark.anyio
async def test_whoever_stops_reading_stops_the_model() -> None:
    closed: list[bool] = []
    stream = paced(source(*[Delta(text="x")] * 100_000, closed=closed), TICK, 4)
    await anext(stream)
    await stream.aclose()
    assert closed == [True]


@pytest.mark.anyio
async def test_no_more_is_generated_than_may_wait() -> None:
    made = 0

    async def much() -> AsyncGenerator[Delta]:
        nonlocal made
        while made < 1000:
            made += 1
            yield Delta(text="x" * 1024)

    stream = paced(much(), TICK, 4)
    for _ in range(20):
        await anext(stream)
    assert made <= MOST_HELD // 1024 + 1
    await stream.aclose()


@pytest.mark.parametrize("obfuscation", [None, True, False])
def test_the_official_client_reads_a_paced_stream(gateway: Any, obfuscation: bool | None) -> None:
    text = "eins zwei drei vier fünf sechs sieben"
    running = gateway(
        {"fake": FakeBackend(Answer(text, latency=0.002))}, stream_pacing=0.004, stream_pacing_characters=3
    )
    options: dict[str, Any] = {"include_usage": True}
    if obfuscation is not None:
        options["include_obfuscation"] = obfuscation
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "count"}],
                stream=True,
                stream_options=options,  # type: ignore[arg-type]
            )
        )
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == text and {len(piece) for piece in said[:-2]} <= {3, 0}
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 7
    filled = ["obfuscation" in chunk.to_dict() for chunk in chunks]
    assert filled == [obfuscation is not False] * len(chunks)


def test_chunks_are_filled_without_pacing_on_request(gateway: Any) -> None:
    running = gateway({"fake": FakeBackend("one two")})
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"include_obfuscation": True}
        ask: Any = client.completions.create
        chunks = list(ask(model="fake", prompt="x", stream=True, stream_options=options))
    sizes = {len(chunk.to_json(indent=None)) for chunk in chunks}
    assert len(chunks) == 3 and all(chunk.to_dict()["obfuscation"] for chunk in chunks) and len(sizes) <= 3
