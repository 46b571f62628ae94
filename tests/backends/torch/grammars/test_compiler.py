"""A grammar's state: masks, rolling along a tree, what is forced, and what a wrong grammar is answered."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.grammars.grammar import GrammarCompiler, GrammarMatcher
from agentspec.backends.torch.grammars.notation import closed_schema, lark_string
from agentspec.errors import InvalidRequestError

END = 256


@pytest.fixture(scope="module")
def grammars(byte_tokens: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokens, 259, [END])


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_the_mask_is_what_a_regular_expression_says(grammars: GrammarCompiler, byte_tokens: Any) -> None:
    constraint, said = grammars.compile("start: /[ab]{1,2}c?/", param="p").start(), ""
    for character in "abc":
        mask = constraint.mask()
        for other in "abcd":
            token = ids(byte_tokens, other)[0]
            longer = [said + other + rest for rest in ("", "a", "b", "c", "ac", "bc")]
            assert bool(mask[token]) == constraint.allows(token) == any(re.fullmatch("[ab]{1,2}c?", t) for t in longer)
        assert bool(mask[END]) == constraint.allows(END) == (re.fullmatch("[ab]{1,2}c?", said) is not None)
        constraint.advance(ids(byte_tokens, character)[0])
        said += character
    assert np.flatnonzero(constraint.mask().numpy()).tolist() == [END] == constraint.forced()


def brute_force(grammar: Any, tokens: list[int], parents: list[int]) -> list[int]:
    """The nodes whose whole path a fresh state follows."""
    admitted = []
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        state: GrammarMatcher = grammar.start()
        fits = True
        for token in path:
            fits = fits and 0 <= token < 259 and state.allows(token)
            if fits:
                state.advance(token)
        ended = END in path[:-1]
        if fits and not ended:
            admitted.append(node)
    return admitted


@given(data=st.data())
def test_a_tree_is_cut_to_what_each_path_alone_is_allowed(
    grammars: GrammarCompiler, byte_tokens: Any, data: Any
) -> None:
    grammar = grammars.compile('start: /a*/ ("b" /[ab]/)* "c"?', param="p")
    alphabet = [*ids(byte_tokens, "abcd"), END, -1, 10**6]
    tokens = data.draw(st.lists(st.sampled_from(alphabet), max_size=14))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(tokens))]
    state = grammar.start()
    assert state.admitted(tokens, parents) == brute_force(grammar, tokens, parents)
    assert state.admitted(tokens, parents) == brute_force(grammar, tokens, parents)  # the state did not move


@pytest.mark.parametrize(
    "source", ["start: /[a-z/", "start: nothing", '{"grammars": [{"json_schema": {"type": "x"}}]}']
)
def test_a_wrong_grammar_is_the_callers_mistake(grammars: GrammarCompiler, source: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as caught:
            grammars.compile(source, param="structured_outputs")
        assert caught.value.param == "structured_outputs"


def test_the_same_grammar_is_compiled_once(grammars: GrammarCompiler) -> None:
    assert grammars.compile('start: "a"', param="p") is grammars.compile('start: "a"', param="p")


def test_a_model_without_an_end_or_a_fast_tokenizer_cannot_be_constrained(byte_tokens: Any) -> None:
    for tokenizer, ends in ((byte_tokens, []), (object(), [END])):
        with pytest.raises(InvalidRequestError, match="cannot be constrained"):
            GrammarCompiler(tokenizer, 259, ends).compile('start: "a"', param="p")


def test_literals_and_special_tokens_are_written_as_a_grammar_wants_them(
    grammars: GrammarCompiler, byte_tokens: Any
) -> None:
    for text in ('"', "\\", 'a"b\\n', "line\nline\r", "é😀", "<|end|>x"):
        state = grammars.compile(f"start: {lark_string(text)}", param="p").start()
        for byte in text.encode():
            token = byte_tokens.convert_tokens_to_ids(sorted_symbol(byte))
            assert state.allows(token), text
            state.advance(token)
        assert state.allows(END)
    state = grammars.compile(f"start: {grammars.symbol('<|user|>')} {grammars.symbol('<x>')}", param="p").start()
    assert np.flatnonzero(state.mask().numpy()).tolist() == [257]


def sorted_symbol(byte: int) -> str:
    """The symbol that stands for a byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = list(itertools.filterfalse(printable.__contains__, range(256)))
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def test_objects_that_list_their_properties_are_closed_unless_the_schema_says_otherwise() -> None:
    inner = {"properties": {"properties": {"type": "string"}}}
    closed = closed_schema({"type": "object", "properties": {"a": inner, "b": {"enum": [{"properties": {}}]}}})
    assert closed["additionalProperties"] is False and closed["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in closed["properties"]["a"]["properties"]
    assert closed["properties"]["b"] == {"enum": [{"properties": {}}]}
    for schema in (
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "patternProperties": {"x": {}}},
        {"allOf": [inner, inner]},
        {"type": "object"},
    ):
        assert {**closed_schema(schema), "x-guidance": None} == {**schema, "x-guidance": None}


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", **A, "required": ["a", "b"]},
        {"type": "object", **A, "required": ["a"], "anyOf": [{**B, "required": ["b"]}, {"required": ["c"]}]},
        {"type": "object", "required": ["a"], "anyOf": [B, {"properties": {"c": {}}}]},
        {"$ref": "#/$defs/A", **B, "$defs": {"A": {"type": "object", **A}}},
        {"type": "object", **A, "anyOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": B}},
    ],
    ids=["a required one", "alternatives", "required beside alternatives", "a reference", "alternatives by reference"],
)
def test_properties_that_an_object_lists_in_no_one_place_may_be_written(
    grammars: GrammarCompiler, byte_tokens: Any, schema: dict[str, Any]
) -> None:
    inside = {"type": "object", "properties": {"in": schema}, "$defs": schema.get("$defs", {})}
    for nested in (schema, inside):
        source = json.dumps({"grammars": [{"json_schema": closed_schema(nested)}]})
        state, value = grammars.compile(source, param="p").start(), '{"a": 1, "b": "x"}'
        for token in ids(byte_tokens, value if nested is schema else f'{{"in": {value}}}'):
            assert state.allows(token)
            state.advance(token)
        assert state.allows(END)


def test_alternatives_of_a_closed_object_leave_it_closed() -> None:
    schema = {"type": "object", **A, "anyOf": [{"required": ["a"]}, {"type": "object"}]}
    assert closed_schema(schema)["additionalProperties"] is False
