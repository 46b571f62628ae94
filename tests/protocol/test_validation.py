from __future__ import annotations

from typing import Annotated, Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import (
    REQUIRED,
    Body,
    Content,
    Count,
    Model,
    Number,
    Text,
    Texts,
    TokenIds,
    must,
    only,
)


class Inner(Model):
    name: Text = REQUIRED


class Sample(Body):
    flag: bool = False
    size: Count | None = None
    ratio: Number | None = None
    text: Text | None = None
    content: Content | None = None
    stop: Texts | None = None
    stop_token_ids: TokenIds | None = None
    table: dict[str, Any] | None = None
    inner: list[Inner] | None = None
    even: Annotated[int, must(lambda value: value % 2 == 0, " must be even")] | None = None
    beam: Annotated[Any, only(False, "off")] = None


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [
        ("flag", 1, "flag must be a boolean, not a number"),
        ("size", True, "size must be an integer, not a boolean"),
        ("size", 1.5, "size must be an integer, not a number"),
        ("size", -1, "size must lie between 0 and 2147483647"),
        ("size", 2**31, "size must lie between 0 and 2147483647"),
        ("ratio", "1", "ratio must be a number, not a string"),
        ("ratio", 10**400, "ratio is too large"),
        ("ratio", float("nan"), "ratio is too large"),
        ("text", ["a"], "text must be a string, not an array"),
        ("text", "\udfff", "text holds half a surrogate pair, which is not text"),
        ("content", {}, "content must be a string or an array of text parts, not an object"),
        ("stop", {}, "stop must be an array, not an object"),
        ("stop", ["a", 1], "stop must be a string, not a number"),
        ("stop", ["a"] * 65, "stop has 65 entries; 64 are allowed"),
        ("stop", ["a" * 1025], "stop must have at most 1024 characters"),
        ("stop_token_ids", [-1], "stop_token_ids must lie between 0 and 2147483647"),
        ("table", [], "table must be an object, not an array"),
        ("inner", [{"name": "a"}, 5], "inner[1] must be an object, not a number"),
        ("inner", [{}], "inner[0].name must be a string, not null"),
        ("even", 3, "even must be even"),
        ("beam", True, "beam = True is not supported by this model"),
        ("beam", 0, "beam = 0 is not supported by this model"),
        ("beam", [0], "beam = an array is not supported by this model"),
    ],
)
def test_a_refusal_is_a_sentence_that_begins_with_the_field(field: str, value: Any, refusal: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sample.parse({field: value})
    assert caught.value.message == refusal and refusal.startswith(f"{caught.value.param} ")


def test_null_is_absent_and_only_what_is_given_counts() -> None:
    sample = Sample.parse({"size": None, "ratio": 1, "stop": ["a"], "beam": "off", "other": 1})
    assert sample.given("size", "ratio", "stop") == {"ratio": 1.0, "stop": ("a",)}


def test_unknown_fields_are_refused_at_the_end() -> None:
    Sample.finish({"size": 1, "user": "inert", "other": None})
    with pytest.raises(InvalidRequestError, match=r"caf\? is not known") as caught:
        Sample.finish({"café": 1})
    assert caught.value.param == "caf?"
    with pytest.raises(InvalidRequestError, match=r"by this model; did you mean 'size'\?$") as caught:
        Sample.finish({"sise": 1})
    assert caught.value.param == "sise"
