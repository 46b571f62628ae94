"""Grows schemas, regular expressions and grammars, and follows those that are accepted for some tokens."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentspec.backends.torch.text.structured_output import StructuredOutputBuilder
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import InvalidRequestError
from agentspec.types import DEFAULT_TENANT, GenerateRequest, SamplingParams, StructuredOutputs

Json = Any
END = 256

NAMES = st.sampled_from(["a", "b", "name", "é", "$ref", "properties", "", "x y"])
COUNTS = st.one_of(st.integers(-1, 4), st.sampled_from([10, 1000, 10**6, 10**12, 2.5, "3", None]))
NUMBERS = st.one_of(
    st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([10**30, 1e308])
)
VALUES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=6))
REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/items", "#/nothing", "http://x", "a"])
ATOMS = st.sampled_from(
    ["a", "b", ".", "\\d", "\\w", "[a-c]", "[^a]", "é", "\\n", "x*", "(?i)k", "\\p{L}", "^", "$", "\\b", "/"]
)


TYPES: st.SearchStrategy[Json] = st.sampled_from(
    ["string", "integer", "number", "object", "array", "null", "boolean", "nothing", ["string", "null"]]
)


def schemas() -> st.SearchStrategy[Json]:
    plain = st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES,
            "enum": st.lists(VALUES, max_size=4),
            "const": VALUES,
            "minLength": COUNTS, "maxLength": COUNTS, "minItems": COUNTS, "maxItems": COUNTS,
            "minProperties": COUNTS, "maxProperties": COUNTS,
            "minimum": NUMBERS, "maximum": NUMBERS, "exclusiveMinimum": NUMBERS, "multipleOf": NUMBERS,
            "pattern": expressions(), "format": st.sampled_from(["date", "uuid", "email", "ipv6", "nothing"]),
            "$ref": REFERENCES, "description": st.text(max_size=8), "uniqueItems": st.booleans(),
        },
    )  # fmt: skip

    def grown(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
        several = st.lists(inner, max_size=3)
        named = st.dictionaries(NAMES, inner, max_size=3)
        return st.builds(
            lambda own, more: {**own, **more},
            plain,
            st.fixed_dictionaries(
                {},
                optional={
                    "properties": named, "patternProperties": named, "$defs": named, "additionalProperties": inner,
                    "required": st.lists(NAMES, max_size=3), "items": inner, "prefixItems": several,
                    "anyOf": several, "oneOf": several, "allOf": several, "not": inner,
                },
            ),
        )  # fmt: skip

    return st.one_of(st.booleans(), st.recursive(plain, grown, max_leaves=12))


def expressions() -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "{2}", "{0,3}", "{3,}", "{20}", "{1000}", "{5000}", "{99999999999}", "*?"])

    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.builds(lambda one, count: f"({one}){count}", inner, counts),
            st.lists(inner, min_size=1, max_size=4).map("".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        )

    return st.one_of(st.recursive(ATOMS, grown, max_leaves=10), st.text("ab(|)[]{}*+?\\^$.,0123", max_size=20))


def grammars() -> st.SearchStrategy[str]:
    names = st.sampled_from(["start", "one", "two", "three", "FOUR", "FIVE"])
    atoms = st.one_of(
        names,
        st.sampled_from(['"a"', '"b" "c"', '""', "/[a-z]+/", "<|user|>", "@answer", "%json {}", '"a".."f"', "<[3-9]>"]),
        expressions().map(lambda one: f"/{one}/"),
    )

    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        counts = st.sampled_from(["", "*", "+", "?", "{3}", "{0,2}", "~2..4", "{100000}"])
        return st.one_of(
            st.lists(inner, min_size=1, max_size=4).map(" ".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({' | '.join(parts)})"),
            st.builds(lambda one, count: f"({one}){count}", inner, counts),
        )

    bodies = st.recursive(atoms, grown, max_leaves=8)
    written = st.dictionaries(names, bodies, min_size=1, max_size=5).map(
        lambda rules: "\n".join(f"{name}: {body}" for name, body in rules.items())
    )
    raw = st.text('start: |"/()[]{}~*+?%@<>ab\n\\01', max_size=60).map(lambda text: "start: " + text)
    return st.one_of(written, written.map(lambda text: text.replace(": ", " ::= ").replace("start", "root")), raw)


FORMS = st.one_of(
    schemas().map(lambda one: ("json", one)),
    expressions().map(lambda one: ("regex", one)),
    grammars().map(lambda one: ("grammar", one)),
    st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=5).map(lambda one: ("choice", tuple(one))),
    schemas().map(lambda one: ("tool", one)),
)


def builder() -> StructuredOutputBuilder:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template="{{ messages }}")
    return StructuredOutputBuilder(TokenizerAdapter(fast), 259, frozenset({END}))


def asked(kind: str, value: Json) -> GenerateRequest:
    said = [{"role": "user", "content": "x"}]
    if kind != "tool":
        sampling = SamplingParams(structured_outputs=StructuredOutputs(**{kind: value}))
        return GenerateRequest("m", messages=said, sampling=sampling)
    function = {"name": "f", "parameters": value}
    return GenerateRequest(
        "m", messages=said, tools=({"type": "function", "function": function},), tool_choice="required"
    )


def grow_forms(examples: int) -> dict[str, int]:
    """How many were accepted and refused, by kind. Raises anything but an `InvalidRequestError`."""
    build, counted = builder(), Counter[str]()

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(FORMS, st.integers(0, 2**32))
    def grow(form: tuple[str, Json], seed: int) -> None:
        kind, value = form
        chosen = random.Random(seed)
        try:
            output = build.build(asked(kind, value), "x")
            assert output.source is not None
            state = build.compile(DEFAULT_TENANT, output.source).start()
            for _ in range(24):
                token = chosen.choice(state.mask().nonzero().flatten().tolist())
                assert state.allows(token)
                state.admitted([*state.forced()[:2], token], [-1] * (len(state.forced()[:2]) + 1))
                state.advance(token)
                if token == END:
                    break
            counted[f"{kind} accepted"] += 1
        except InvalidRequestError as error:
            assert error.param in ("structured_outputs", "tools[0].function.parameters") and len(error.message) < 700
            assert "<state>" not in error.message and "backtrace" not in error.message
            counted[f"{kind} refused"] += 1

    grow()
    build.close()
    return counted
