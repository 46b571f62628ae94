"""Exact under rules: with a grammar, bad words, a shortest length and several choices, any drafter or none.

What may come next is found out here by another library, from regular expressions written by hand, not by the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import regex

from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.types import Draft, SamplingParams
from tests.backends.torch.conftest import tree_of

Script = Callable[[list[int], int], Draft | None]
Allowed = Callable[[Sequence[int]], Collection[int]]

EOS = 256
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 257, 40, 41, 258]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["ox", "owl"]}, "ages": {"type": "array", "items": {"enum": [1, 12, 20]}}},
    "required": ["kind", "ages"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
# A grammar as the engine reads it, and the same language as a regular expression.
LANGUAGES = {
    "words": ("start: /[a-c]{2,8}( [d-f]+)?/", "[a-c]{2,8}( [d-f]+)?"),
    "choice": ('start: "yes" | "yesterday" | "no"', "yes|yesterday|no"),
    "fixed": ('start: "the only answer"', "the only answer"),
    "schema": (
        json.dumps({"grammars": [{"json_schema": SCHEMA}]}),
        r'\{"kind":"(ox|owl)","ages":\[((1|12|20)(,(1|12|20))*)?\]\}',
    ),
    "nested": ('start: "(" start? ")" | "x"', r"(?P<n>\((?&n)?\)|x)"),
}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5),
    "plain": SamplingParams(temperature=1.0, seed=5),
    "hot, truncated": SamplingParams(temperature=1.7, top_p=0.9, top_k=5, seed=12),
    "all": SamplingParams(temperature=0.9, top_p=0.95, min_p=0.01, presence_penalty=0.3, logit_bias={70: 2.0}, seed=17),
}
OFTEN = ("greedy, penalties", "all")


class Language:
    """Which byte tokens may follow, by partial matching."""

    def __init__(self, pattern: str, tokenizer: Any) -> None:
        self.pattern = regex.compile(pattern)
        self.characters = {tokenizer.encode(chr(code))[0]: chr(code) for code in range(32, 127)}

    def __call__(self, answer: Sequence[int]) -> Collection[int]:
        said = "".join(self.characters[token] for token in answer)
        fits = {
            token
            for token, character in self.characters.items()
            if self.pattern.fullmatch(said + character, partial=True) is not None
        }
        return fits | ({EOS} if self.pattern.fullmatch(said) else set())

    def text(self, answer: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in answer if token != EOS)


def drafters(answer: Sequence[int], allowed: Allowed) -> dict[str, Script]:
    """Drafters good and bad, `answer` being the right one; they propose what is allowed, and what is not."""
    whole, rng = [*PROMPT, *answer], np.random.default_rng(3)

    def legal(text: list[int], budget: int) -> Draft:
        """A random path of the language."""
        said = text[len(PROMPT) :]
        for _ in range(min(budget, 6)):
            if said and said[-1] == EOS:
                break
            said = [*said, int(rng.choice(sorted(allowed(said))))]
        return tree_of.chain(said[len(text) - len(PROMPT) :])

    return {
        "right": lambda text, budget: tree_of.chain(whole[len(text) :][:5]),
        "wrong": lambda text, budget: tree_of.chain([(token + 1) % 256 for token in whole[len(text) :][:5]]),
        "legal": legal,
        "trees": lambda text, budget: tree_of.winding(whole[len(text) :], rng, min(budget, 16)),
        "end first": lambda text, budget: tree_of.chain([EOS, *whole[len(text) :][:2]]),
        "nothing": lambda text, budget: None,
    }


@pytest.fixture(scope="module")
def grammars(byte_tokens: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokens, 259, [EOS])


@pytest.mark.parametrize(
    ("language", "sampling"),
    [
        pair if pair[0] == "schema" or pair[1] in OFTEN else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in product(LANGUAGES, SAMPLINGS)
    ],
)
def test_every_drafter_gives_the_oracles_answer(
    lab: Any, grammars: GrammarCompiler, byte_tokens: Any, language: str, sampling: str
) -> None:
    source, pattern = LANGUAGES[language]
    allowed, params = Language(pattern, byte_tokens), SAMPLINGS[sampling]
    rules = ConstraintSpec(grammars.compile(source, param="p"))
    want = lab.oracle(PROMPT, params, allowed=allowed, max_tokens=40)
    if want[-1] == EOS:
        assert allowed.pattern.fullmatch(allowed.text(want))
    off = lab.run(PROMPT, params, constraints=rules, max_tokens=40)
    lab.require_same(PROMPT, params, off.tokens, want, allowed)
    scripts = drafters(want, allowed)
    outcomes = lab.run_each(PROMPT, params, scripts.values(), constraints=rules, max_tokens=40)
    for name, outcome in zip(scripts, outcomes, strict=True):
        print(name, outcome.speculation)
        lab.require_same(PROMPT, params, outcome.tokens, want, allowed)
        assert outcome.finish == ("stop" if want[-1] == EOS else "length")
        assert outcome.text == off.text == allowed.text(want)
    assert not lab.divergences, "tiny float32 models should show no near-ties"


@pytest.mark.parametrize("stop", ["ow", "l", '","', "[1", "]}"])
def test_a_stop_string_inside_a_form_ends_it(lab: Any, grammars: GrammarCompiler, byte_tokens: Any, stop: str) -> None:
    source, pattern = LANGUAGES["schema"]
    allowed = Language(pattern, byte_tokens)
    params = SamplingParams(temperature=1.0, seed=5, stop=(stop,))
    rules = ConstraintSpec(grammars.compile(source, param="p"))
    longer = lab.oracle(PROMPT, params, allowed=allowed, max_tokens=40)
    whole = allowed.text(longer)
    assert whole.count('"') >= 5
    scripts = drafters(longer, allowed).values()
    for outcome in lab.run_each(PROMPT, params, scripts, constraints=rules, max_tokens=40):
        assert outcome.text == whole.partition(stop)[0] and outcome.finish in ("stop", "length")


@pytest.mark.parametrize("min_tokens", [1, 5, 23])
@pytest.mark.parametrize("sampling", ["greedy", "plain", "all"])
def test_no_end_comes_before_min_tokens(lab: Any, sampling: str, min_tokens: int) -> None:
    eager = replace(SAMPLINGS[sampling], logit_bias={EOS: 100.0}, min_tokens=min_tokens)

    def allowed(answer: Sequence[int]) -> Collection[int]:
        return range(259) if len(answer) >= min_tokens else [token for token in range(259) if token != EOS]

    want = lab.oracle(PROMPT, eager, allowed=allowed)
    assert len(want) == min_tokens + 1 and want[-1] == EOS
    for outcome in lab.run_each(PROMPT, eager, [None, *drafters(want, allowed).values()]):
        assert outcome.tokens == want


@pytest.mark.parametrize(
    "sampling", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SAMPLINGS]
)
def test_bad_words_never_appear(lab: Any, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    free = lab.oracle(PROMPT, params)
    words = ((free[0],), tuple(free[2:4]), tuple(free[1:4]))

    def allowed(answer: Sequence[int]) -> Collection[int]:
        barred = {w[-1] for w in words if list(w[:-1]) == list(answer[len(answer) - len(w) + 1 :])[: len(w) - 1]}
        return [token for token in range(259) if token not in barred]

    want = lab.oracle(PROMPT, params, allowed=allowed)
    assert want != free
    scripts = [None, *drafters(want, allowed).values(), *drafters(free, allowed).values()]
    for outcome in lab.run_each(PROMPT, params, scripts, constraints=ConstraintSpec(bad_words=words)):
        assert outcome.tokens == want
