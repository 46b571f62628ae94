from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.proxy.auth import Caller
from agentspec.proxy.completions import CompletionWriter, parse
from agentspec.proxy.responses import Gathered, encode
from agentspec.types import Delta, GenerateRequest, Labels, Prompt, TokenLogprob, Usage

CALLER = Caller("t", Labels(), speculation=True, store=False)


def ask(**fields: Any) -> GenerateRequest:
    return parse({"model": "m", "prompt": "p", **fields}, CALLER)[0]


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("p", "p", None), (["p"], "p", None), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2))],
)
def test_prompts(prompt: Any, text: str | None, token_ids: tuple[int, ...] | None) -> None:
    request = ask(prompt=prompt)
    assert (request.text, request.token_ids, request.tenant, request.store) == (text, token_ids, "t", False)


def test_logprobs_are_a_number_here() -> None:
    assert not ask().sampling.logprobs
    assert ask(logprobs=0).sampling.logprobs and ask(logprobs=0).sampling.top_logprobs == 0
    assert ask(logprobs=5).sampling.top_logprobs == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"n": 0}, "n"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"tools": []}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask(**fields)
    assert caught.value.param == param


def test_echo_wants_the_prompt_scored_as_the_answer_is() -> None:
    assert ask(echo=True).return_prompt and ask(echo=True).sampling.prompt_logprobs is None
    assert ask(echo=True, logprobs=2).sampling.prompt_logprobs == 2
    assert ask(return_token_ids=True).return_prompt
    assert ask(n=2, best_of=2, guided_choice=["a"]).sampling.n == 2


ECHOED = Prompt("a bc", (1, 2, 3), (TokenLogprob(2, " b", -1.0), TokenLogprob(3, "c", -2.0)))
DELTAS = [
    Delta(text="x", token_ids=(7,), logprobs=(TokenLogprob(7, "x", -0.5),), prompt=ECHOED),
    Delta(text="y", token_ids=(8,), logprobs=(TokenLogprob(8, "y", -0.5),), index=1, finish_reason="length"),
    Delta(text="z", token_ids=(9,), logprobs=(TokenLogprob(9, "z", -0.5),), finish_reason="stop", usage=Usage(3, 3)),
]


def test_an_echoed_prompt_stands_before_every_choice() -> None:
    def writer() -> CompletionWriter:
        return CompletionWriter("m", True, True, True, token_ids=True, echo=True, choices=2)

    answer, streaming = Gathered(), writer()
    for delta in DELTAS:
        answer.add(delta)
    whole = writer().body(answer)["choices"]
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
    answer = Gathered()
    for delta in DELTAS[:1]:
        answer.add(delta)
    [choice] = CompletionWriter("m", True, True, False, prompt_logprobs=True).body(answer)["choices"]
    assert choice["text"] == "x" and choice["logprobs"] is None
    assert [entry and list(entry) for entry in choice["prompt_logprobs"]] == [None, ["2"], ["3"]]


def test_harmless_values_are_accepted() -> None:
    assert ask(echo=False, suffix="", best_of=1, n=1, user="u") == ask()


@given(st.lists(st.lists(st.text(max_size=3), max_size=3), min_size=1, max_size=4))
def test_text_offsets_run_through_the_chunks(words: list[list[str]]) -> None:
    writer = CompletionWriter("m", False, True, True)
    whole, answer, offsets = "", Gathered(), []
    for group in words:
        delta = Delta(text="".join(group), logprobs=tuple(TokenLogprob(0, word, -1.0) for word in group))
        answer.add(delta)
        for chunk in writer.chunks(delta):
            offsets += chunk["choices"][0]["logprobs"]["text_offset"]
        whole += delta.text
    tokens = [word for group in words for word in group]
    assert offsets == [sum(len(word) for word in tokens[:i]) for i in range(len(tokens))]
    body = CompletionWriter("m", False, True, True).body(answer)
    assert body["choices"][0]["text"] == whole and body["choices"][0]["logprobs"]["text_offset"] == offsets


def test_chunks() -> None:
    writer = CompletionWriter("m", include_usage=True, include_speculation=True, logprobs=False)
    written = [*writer.chunks(Delta()), *writer.chunks(Delta(text="a", finish_reason="stop", usage=Usage(1, 1)))]
    assert [chunk["object"] for chunk in written] == ["text_completion"] * 2
    assert written[0]["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}]
    assert written[1]["choices"] == [] and written[1]["usage"]["total_tokens"] == 2
    encode(written)
