from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentspec.protocol.completion_response import CompletionWriter
from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.responses import Accumulator, encode
from agentspec.types import Delta, GenerateRequest, Prompt, SamplingParams, TokenLogprob, Usage

ECHOED = Prompt("a bc", (1, 2, 3), (TokenLogprob(2, " b", -1.0), TokenLogprob(3, "c", -2.0)))
DELTAS = [
    Delta(text="x", token_ids=(7,), logprobs=(TokenLogprob(7, "x", -0.5),), prompt=ECHOED),
    Delta(text="y", token_ids=(8,), logprobs=(TokenLogprob(8, "y", -0.5),), index=1, finish_reason="length"),
    Delta(text="z", token_ids=(9,), logprobs=(TokenLogprob(9, "z", -0.5),), finish_reason="stop", usage=Usage(3, 3)),
]


def writer(*, n: int = 1, logprobs: bool = True, **form: bool) -> CompletionWriter:
    request = GenerateRequest("m", text="p", sampling=SamplingParams(n=n, logprobs=logprobs))
    return CompletionWriter(request, AnswerFormat(**form))


def test_an_echoed_prompt_stands_before_every_choice() -> None:
    form = {"usage": True, "token_ids": True, "echo": True}
    answer, streaming = Accumulator(), writer(n=2, **form)
    for delta in DELTAS:
        answer.add(delta)
    whole = writer(n=2, **form).body(answer)["choices"]
    streamed = [chunk["choices"][0] for delta in DELTAS for chunk in streaming.chunks(delta) if chunk["choices"]]
    assert [choice["text"] for choice in whole] == ["a bcxz", "a bcy"]
    assert [choice["text"] for choice in streamed] == ["a bcx", "a bcy", "z"]
    assert whole[0]["logprobs"]["tokens"] == ["a", " b", "c", "x", "z"]
    assert whole[0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -0.5, -0.5]
    assert whole[0]["logprobs"]["text_offset"] == [0, 1, 3, 4, 5]
    assert streamed[2]["logprobs"]["text_offset"] == [5] and streamed[1]["logprobs"]["text_offset"] == [0, 1, 3, 4]
    assert whole[0]["token_ids"] == [7, 9] and whole[1]["prompt_token_ids"] == [1, 2, 3]
    encode(whole)


def test_prompt_logprobs_stand_on_the_choice() -> None:
    answer = Accumulator()
    for delta in DELTAS[:1]:
        answer.add(delta)
    [choice] = writer(logprobs=False, usage=True, prompt_logprobs=True).body(answer)["choices"]
    assert choice["text"] == "x" and choice["logprobs"] is None
    assert [entry and list(entry) for entry in choice["prompt_logprobs"]] == [None, ["2"], ["3"]]


@given(st.lists(st.lists(st.text(max_size=3), max_size=3), min_size=1, max_size=4))
def test_text_offsets_run_through_the_chunks(words: list[list[str]]) -> None:
    writing = writer()
    whole, answer, offsets = "", Accumulator(), []
    for group in words:
        delta = Delta(text="".join(group), logprobs=tuple(TokenLogprob(0, word, -1.0) for word in group))
        answer.add(delta)
        for chunk in writing.chunks(delta):
            offsets += chunk["choices"][0]["logprobs"]["text_offset"]
        whole += delta.text
    tokens = [word for group in words for word in group]
    assert offsets == [sum(len(word) for word in tokens[:i]) for i in range(len(tokens))]
    body = writer().body(answer)
    assert body["choices"][0]["text"] == whole and body["choices"][0]["logprobs"]["text_offset"] == offsets


def test_chunks() -> None:
    writing = writer(logprobs=False, usage=True)
    written = [*writing.chunks(Delta()), *writing.chunks(Delta(text="a", finish_reason="stop", usage=Usage(1, 1)))]
    assert [chunk["object"] for chunk in written] == ["text_completion"] * 2
    assert written[0]["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}]
    assert written[1]["choices"] == [] and written[1]["usage"]["total_tokens"] == 2
    encode(written)
