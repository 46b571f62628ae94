"""What is counted in schemas, regular expressions and grammars before they are compiled."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.grammars.complexity import MAX_REPEATS, Complexity, measure_regex, satisfiable
from agentspec.backends.torch.grammars.lark_outline import measure_lark
from agentspec.backends.torch.grammars.notation import as_lark
from agentspec.backends.torch.grammars.schema_outline import measure_schema
from agentspec.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("regex", "depth", "repeats"),
    [
        ("abc", 1, 1),
        ("((a)b)", 3, 1),
        (r"\((a)\)[(]", 2, 1),
        ("(a{3}){4}", 2, 12),
        ("(a{3}|b{5}){4}", 2, 20),
        ("a{3}b{4}", 1, 4),
        ("a{2}{3}", 1, 6),
        ("(a{30})*", 2, 30),
        ("a{,7}", 1, 7),
        ("(?x)a{ 2 , 9 }", 2, 9),
        ("[{3}]", 1, 1),
        (r"\{3}", 1, 1),
        ("a{99999999999}", 1, MAX_REPEATS + 1),
        ("1234567890123", 1, 1),
        (")))((", 3, 1),
    ],
)
def test_regular_expressions(regex: str, depth: int, repeats: int) -> None:
    found = measure_regex(regex)
    assert (found.depth, found.repeats, found.characters) == (depth, repeats, len(regex))


def test_blanks_in_a_quantifier_take_linear_time() -> None:
    assert measure_regex("a{" + " " * 100_000 + "x").repeats == 1
    assert measure_regex("{ , " * 30_000).repeats == 1


@given(st.text("ab(){}[]|*+?\\,0123456789", max_size=40))
def test_any_text_is_counted(text: str) -> None:
    assert measure_regex(text).characters == len(text)


def chain(count: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(count)) + f'\nr{count}: "z"'


def test_chains_of_rules() -> None:
    assert [measure_lark(chain(count), "p").depth - count for count in (1, 10, 1000)] == [3, 3, 3]
    assert measure_lark(chain(5), "p").simple and not measure_lark(chain(500), "p").simple
    circle = 'start: a\na: b "x" | "y"\nb: c\nc: a'
    assert measure_lark(circle, "p").depth == 5


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ('start: "a" start', False),
        ('start: "a" start | "b"', True),
        ('start: "a" start?', True),
        ('start: "a" start*', True),
        ('start: "a" start+', False),
        ('start: "a" [start]', True),
        ('start: "a" (start | "b" start)', False),
        ('start: "a" (start | "b" start | )', True),
        ('start: "a" start{0,2}', True),
        ('start: "a" start{1,2}', False),
        ('start: "a" start~0..2', True),
        ("start: one\none: two\ntwo: one", False),
        ("start: one\none: two | THREE\ntwo: one\nTHREE: /x/", True),
        ("start: one\none: two\n    | /x/\ntwo: one", True),
        ('start: "a" unknown', True),
        ('start: "start: start" // start\n     | "#"', True),
        ("start: %json {\n  \"items\": {}\n}", True),
        ('start: X\n%import common.INT -> X\n%ignore " "', True),
    ],
)  # fmt: skip
def test_grammars_that_no_finite_text_fits(grammar: str, fits: bool) -> None:
    if fits:
        measure_lark(grammar, "p")
    else:
        with pytest.raises(InvalidRequestError, match="no finite text") as caught:
            measure_lark(grammar, "p")
        assert caught.value.param == "p"


def test_counts_in_grammars() -> None:
    assert measure_lark("start: /(a{30}){40}/", "p").repeats == 1200
    assert measure_lark('start: "a"{500}', "p").repeats == 500
    assert measure_lark('start: "' + "x" * 300 + '"', "p").literal == 302
    assert not measure_lark('start: %lark { start: "a" \n }', "p").simple


@pytest.mark.parametrize(
    ("body", "repeats"),
    [
        ("(a{100}){100}", 10_000),
        ("((a{10} b){10} c){10}", 1000),
        ("(a{30} | b{50}){40}", 2000),
        ("a{2,7}{3}", 21),
        ("a~2..7", 7),
        ("(a~30)~40", 1200),
        ("[a{30}]{40}", 1200),
        ("a{5} | b{6}", 6),
        ("a{,7} b{3}", 7),
        ("(a{5})* | (b{3})+", 5),
        ("((a{1000}){1000}){1000}", MAX_REPEATS + 1),
        ("(a{20}", 20),  # for the compiler to refuse
        ("A{30}", 30),
        ("X{30}", 30),
    ],
)
def test_counts_inside_one_another(body: str, repeats: int) -> None:
    assert measure_lark(f'start: {body}\na: "a"\nb: "b"\nc: "c"\nA: "x"', "p").repeats == repeats


@pytest.mark.parametrize(
    ("terminals", "repeats"),
    [
        ("X: Y{30}\nY: /a{40}/", 1200),
        ("X: (Y{30} Z){2}\nY: Z{40}\nZ: /a/", 2402),
        ("X: /(a{20}){30}/{2}", 1200),
        ("\n".join(f"X{i}: X{i + 1} X{i + 1}" for i in range(30)) + '\nX30: "a"', MAX_REPEATS + 1),
        ("X: Y{30}\nY: X{30}", MAX_REPEATS + 1),
    ],
)
def test_terminals_are_written_out_where_they_are_named(terminals: str, repeats: int) -> None:
    assert measure_lark(f'start: "x"\n{terminals}', "p").repeats == repeats


def test_counts_in_gbnf_are_counted_as_in_lark() -> None:
    found = measure_lark(as_lark('root ::= (("a"{100}) "b"){100} [0-9]{3}', "p"), "p")
    assert found.repeats == 10_000


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ("start: list?END\nlist: start\nEND: /x/", True),
        ("start: END?list\nlist: start\nEND: /x/", False),
        ("start: END list?END\nlist: list\nEND: /x/", True),
        ("?start: A|start?B\nA: /x/\nB: /y/", True),
        ("!?start: _a+_B\n_a: _B | start\n_B: /x/", True),
        ("start: A*start\nA: /x/", False),
        ("start: A(start)\nA: /x/", False),
    ],
)
def test_operators_next_to_names(grammar: str, fits: bool) -> None:
    if fits:
        measure_lark(grammar, "p")
    else:
        with pytest.raises(InvalidRequestError, match="no finite text"):
            measure_lark(grammar, "p")


def test_rules_with_parameters_are_not_taken_for_small() -> None:
    assert not measure_lark('start: one::0x0\none::_: "a" one::incr(_) | ""', "p").simple


def test_a_grammar_of_nothing_but_names_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="more than 200,000"):
        measure_lark("start: " + "a " * 200_001, "p")


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, True),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, True),  # a number fits
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}, True),
        ({"allOf": [{"type": "null"}, {"$ref": "#"}]}, False),
        (LOOP, False),
        ({"$ref": "#/none"}, True),  # the compiler says what is wrong
        (False, False),
        (True, True),
        ({"anyOf": []}, False),
    ],
)
def test_schemas_that_no_finite_value_fits(schema: Any, fits: bool) -> None:
    if fits:
        measure_schema(schema, "p")
    else:
        with pytest.raises(InvalidRequestError, match="no finite value"):
            measure_schema(schema, "p")


def test_levels_of_schemas() -> None:
    linked = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(50)}
    found = measure_schema({"$ref": "#/$defs/d0", "$defs": {**linked, "d50": {}}}, "p")
    assert found.depth == 102 and found.levels > 1000 and not found.simple
    assert measure_schema({"type": "string", "pattern": "(a{20}){20}"}, "p").repeats == 400
    assert measure_schema({"const": "x" * 99}, "p").literal == 99
    assert not measure_schema({"allOf": [{}, {}]}, "p").simple


@pytest.mark.parametrize(
    ("complexity", "says"),
    [
        (Complexity(depth=201), "201 levels"),
        (Complexity(parts=50_001), "50,001 rules"),
        (Complexity(characters=1_000_001), "1,000,001 characters"),
        (Complexity(repeats=MAX_REPEATS + 1), "more than 100,000 counted"),
        (Complexity(literal=20_001), "one text"),
    ],
)
def test_limits_say_what_to_change(complexity: Complexity, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{says}.* allowed: ") as caught:
        complexity.check("field")
    assert caught.value.param == "field"


@pytest.mark.parametrize(
    "grammar", ["root ::= " + "(" * 100, "root ::= a\n" * 600, "x" * 200_000, "root ::= (", "\n" * 99]
)
def test_grammars_in_gbnf_are_bounded(grammar: str) -> None:
    with pytest.raises(InvalidRequestError):
        as_lark(grammar, "p")


def test_rules_that_need_rules() -> None:
    assert satisfiable([[[1, 2]], [[0]], [], [[2], [1]], [[]]]) == [True, True, True, True, False]


@pytest.mark.parametrize("reference", ["#/$defs/a~1b", "#/$defs/a%2Fb"])
def test_references_are_followed_however_they_are_written(reference: str) -> None:
    many = {"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}] * 10}
    schema = {"$ref": reference, "$defs": {"a/b": many}}
    assert not measure_schema(schema, "p").simple


@pytest.mark.parametrize(
    "schema", [{"$ref": "#name"}, {"$id": "x"}, {"$ref": "other.json"}, {"items": {"$anchor": "x"}}]
)
def test_names_that_are_not_followed_are_not_taken_for_small(schema: dict[str, Any]) -> None:
    assert not measure_schema(schema, "p").simple


def test_what_is_required_may_be_anything() -> None:
    measure_schema({"type": "object", "properties": {"a": {}}, "required": [[], {}, 1]}, "p")
