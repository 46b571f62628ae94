"""Answers that end, or keep to a form, wherever a draft happens to: as without drafts. Thousands of them when slow.

Cut at stop strings, end tokens and lengths they are compared with the oracle's text; forms and tool calls, as a reader
of the stream puts them together, with the answer that was made without drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from agentspec.backends.torch.text.structured_output import OutputParserSpec, StructuredOutputBuilder
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.types import DEFAULT_TENANT, GenerateRequest, SamplingParams, StructuredOutputs
from tests.backends.torch.conftest import Ask, tree_of

END, TOGETHER, LENGTH = 256, 16, 20
CUT_CASES = [60, pytest.param(1500, marks=pytest.mark.long)]  # of each of three kinds
FORM_CASES = [8, pytest.param(100, marks=pytest.mark.long)]  # of each form
FIRST, VISIBLE = 33, 94  # tokens 0 to 93 are the visible characters from "!" on
READABLE = dict.fromkeys(range(VISIBLE, 259), -100.0)
SAMPLINGS = (
    SamplingParams(temperature=0, logit_bias=READABLE),
    SamplingParams(temperature=1.0, seed=5, logit_bias=READABLE),
    SamplingParams(temperature=1.3, top_p=0.9, seed=6, logit_bias=READABLE, frequency_penalty=0.4),
)
PROMPTS = [list(text) for text in (b"Hello world", b"a", b"def f(x):\n    return x", b"1, 2, 3, ")]

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["ox", "owl"]}, "ages": {"type": "array", "items": {"enum": [1, 12, 20]}}},
    "required": ["kind", "ages"],
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": SCHEMA | {"additionalProperties": False}}}
    for name in ("count", "feed")
)
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"form": StructuredOutputs(json=SCHEMA)},
    "expression": {"form": StructuredOutputs(regex="[a-c]{2,8}( [d-f]+)?")},
    "call required": {"tools": TOOLS, "tool_choice": "required"},
    "call of one tool": {"tools": TOOLS, "tool_choice": "feed", "parallel_tool_calls": False},
    "call or text": {"tools": TOOLS, "form": StructuredOutputs(choice=("<none>", "<nothing at all>"))},
}


class Whole(NamedTuple):
    """An answer that nothing cut."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int]

    @property
    def text(self) -> str:
        return "".join(chr(FIRST + token) for token in self.tokens)


def drafting(prompt: Sequence[int], answer: Sequence[int], rng: np.random.Generator) -> Any:
    """Drafts that end anywhere: right as far as they go, wrong behind, or a tree in which the right path hides."""
    whole = [*prompt, *answer]

    def script(text: list[int], budget: int) -> Any:
        rest, size = whole[len(text) :], int(rng.integers(0, 9))
        if rng.random() < 0.3:
            return tree_of.winding(rest, rng, size)
        return tree_of.chain([*rest[:size], *rng.integers(0, 259, size=int(rng.integers(0, 3))).tolist()])

    return script


def groups(asks: Iterator[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
    """Requests with what is expected of them, as many as run together."""
    while group := [case for _, case in zip(range(TOGETHER), asks, strict=False)]:
        yield group


@pytest.fixture(scope="module")
def wholes(lab: Any) -> list[Whole]:
    return [
        Whole(prompt, sampling, lab.oracle(prompt, sampling, max_tokens=LENGTH, stop_ids=()))
        for prompt in PROMPTS
        for sampling in SAMPLINGS
    ]


def cut(whole: Whole, kind: int, at: int, size: int) -> tuple[dict[str, Any], tuple[int, str, str]]:
    """Options that end `whole` at a place, and with how many tokens, which text and what reason it must end then."""
    free = {"sampling": whole.sampling, "max_tokens": LENGTH, "stop_ids": ()}
    match kind:
        case 0:
            stop = whole.text[at : at + size]
            before = whole.text.index(stop)
            sampling = replace(whole.sampling, stop=(stop, "\n never"))
            return free | {"sampling": sampling}, (before + len(stop), whole.text[:before], "stop")
        case 1:
            first = whole.tokens.index(whole.tokens[at])
            return free | {"stop_ids": [whole.tokens[at]]}, (first + 1, whole.text[:first], "stop")
        case _:
            return free | {"max_tokens": at + 1}, (at + 1, whole.text[: at + 1], "length")


@pytest.mark.parametrize("count", CUT_CASES)
def test_answers_end_where_they_should(lab: Any, wholes: list[Whole], count: int) -> None:
    rng = np.random.default_rng(7)

    def cases() -> Iterator[tuple[Any, tuple[int, str, str]]]:
        for index in range(3 * count):
            whole = wholes[index // 3 % len(wholes)]
            options, want = cut(whole, index % 3, int(rng.integers(0, LENGTH)), int(rng.integers(1, 5)))
            script = drafting(whole.prompt, whole.tokens, rng)
            yield Ask(whole.prompt, script=script, **options), want

    for group in groups(cases()):
        for outcome, (_, want) in zip(lab.run_batch([ask for ask, _ in group]), group, strict=True):
            assert (len(outcome.tokens), outcome.text, outcome.finish) == want


def put_together(reading: OutputParserSpec, outcome: Any) -> tuple[str, list[list[str]], str]:
    """Text, calls and end, as a client has them that adds up the deltas of a stream."""
    reader, text, calls, finish = reading.parser(), "", list[list[str]](), ""
    for delta in map(reader.parse, outcome.deltas):
        text, finish = text + delta.text, delta.finish_reason or finish
        for piece in delta.extra.get("tool_calls", []):
            if "id" in piece:
                calls.append(["", ""])
            function = piece["function"]
            calls[piece["index"]][0] += function.get("name", "")
            calls[piece["index"]][1] += function["arguments"]
    return text, calls, finish


@pytest.mark.parametrize("count", FORM_CASES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "call required" else name for name in FORMS]
)
def test_forms_and_calls_are_those_without_drafts(lab: Any, byte_tokens: Any, name: str, count: int) -> None:
    fields = dict(FORMS[name])
    asked = SamplingParams(structured_outputs=fields.pop("form", None))
    request = GenerateRequest("m", messages=[{"role": "user", "content": "x"}], sampling=asked, **fields)
    builder = StructuredOutputBuilder(TokenizerAdapter(byte_tokens), 259, frozenset({END}))
    form = builder.build(request, "x")
    (rules,) = form.constraints(1, None if form.source is None else builder.compile(DEFAULT_TENANT, form.source))
    requests = [
        Ask(prompt, SamplingParams(temperature=1.0, seed=seed), max_tokens=120, constraints=rules)
        for seed, prompt in enumerate(PROMPTS * 2)
    ]
    plain = lab.run_batch(requests)
    wants = [put_together(form.parser_spec, outcome) for outcome in plain]
    called = [calls for _, calls, finish in wants if calls and finish in ("stop", "tool_calls")]
    assert all(
        json.loads(arguments).keys() == SCHEMA["properties"].keys() for calls in called for _, arguments in calls
    )
    assert bool(called) == ("tools" in fields), "what is tested must occur"
    rng = np.random.default_rng(8)

    def cases() -> Iterator[tuple[Any, Any]]:
        for index in range(count):
            at = index % len(requests)
            script = drafting(requests[at].prompt, plain[at].tokens, rng)
            yield replace(requests[at], script=script), (plain[at].tokens, wants[at])

    for group in groups(cases()):
        for outcome, (_, (tokens, want)) in zip(lab.run_batch([ask for ask, _ in group]), group, strict=True):
            assert outcome.tokens == tokens and put_together(form.parser_spec, outcome) == want
