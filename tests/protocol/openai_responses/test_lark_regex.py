"""Grammars as regular expressions: the same texts fit, or there is no expression."""

from __future__ import annotations

import gc
import re
import time
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.protocol.openai_responses.lark_regex import (
    MAX_GRAMMAR,
    NotRegularError,
    WrongGrammarError,
    check_balanced,
    lark_regex,
)

PATCH = r"""
// changes to files, as coding agents write them
start: open (added | gone)+ close
open: "*** Begin" NL
close: "*** End" NL?
added.2: "*** Add: " path NL ("+" /(.*)/ NL -> line)+
gone: "*** Delete: " path NL
path: /[^\n]+/  # to the end of its line
%import common.LF
NL: LF
"""


@pytest.mark.parametrize(
    ("grammar", "fitting", "others"),
    [
        (PATCH, ["*** Begin\n*** Add: a.py\n+x\n+\n*** End", "*** Begin\n*** Delete: b\n*** End\n"],
         ["", "*** Begin\n*** End", "*** Begin\n*** Add: a.py\n*** End", "*** Begin\n*** Delete: b\n*** End\n\n"]),
        ('start: "a"i ["b"] "c"..."e"'.replace("...", ".."), ["abd", "Ac", "ae"], ["a", "abb", "bc"]),
        ('start: x~2 y~1..3\nx: "1" | "2"\n  | "3"\n?y: /[a.$^]/i', ["12a", "33A.$"], ["1a", "123a", "12aaaa", "12b"]),
        ('start: "(a|b)*" "\\n" "\\\\"', ["(a|b)*\n\\"], ["ab\n\\", "a"]),
        ("start: INT WS_INLINE CNAME\n%import common.INT\n%import common.WS_INLINE\n%import common.CNAME",
         ["12 \ta_1", "0 x"], ["a 1", "1 1"]),
        ("start: /a\\/b/ /x.y/s", ["a/bx\ny"], ["a/bxy"]),
    ],
)  # fmt: skip
def test_the_same_texts_fit(grammar: str, fitting: list[str], others: list[str]) -> None:
    regex = re.compile(lark_regex(grammar))
    assert [text for text in fitting if not regex.fullmatch(text)] == []
    assert [text for text in others if regex.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start ")" | "x"', "leads back"),
        ("start: a\na: b\nb: a", "leads back"),
        ("start: other", "not defined"),
        ('a: "x"', "start is not defined"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: /a(?=b)/", "not supported"),
        ("start: /^a/", "not supported"),
        (r"start: /(a)\1/", "not supported"),
        ("start: /a/x", "not supported"),
        ("start: %json {}", "notation"),
        ("start: FLOAT\n%import common.FLOAT", "FLOAT"),
        ('start: ("a"', "missing"),
        ('start: "a")', "out of place"),
        ('start: "a"~99999', "too large"),
        ('start: "ab".."c"', "no range"),
        (r'start: "\ud800"', "no string"),
        ('"a"', "begin with a rule"),
        ("start: " + "(" * 100 + '"a"' + ")" * 100, "levels"),
        ("start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(50)) + 'a50: "x"', "written out"),
        ('start: "a"' + " " * MAX_GRAMMAR, "characters"),
    ],
)
def test_what_has_no_expression(grammar: str, why: str) -> None:
    with pytest.raises(NotRegularError, match=re.escape(why)):
        lark_regex(grammar)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "a"\nstart: "b"', "start is defined more than once"),
        ("?start: a\na.2: /b/\n!a: /c/", "a is defined more than once"),
        ('start: LF\n%import common.LF\nLF: "x"', "LF is defined more than once"),
        ('start: LF\nLF: "x"\n%import common.LF', "LF is defined more than once"),
        ("start: /a)|(b/", "not balanced"),
        ("start: /a[(b/", "not balanced"),
    ],
)
def test_mistakes_of_a_grammar(grammar: str, why: str) -> None:
    with pytest.raises(WrongGrammarError, match=why):
        lark_regex(grammar)


def test_a_terminal_may_be_imported_again() -> None:
    assert lark_regex("start: LF\n%import common.LF\n%import common.LF") == r"(?:\n)"


@pytest.mark.parametrize(
    "regex", ["", "a(b(c)?)*", r"\)\[", "[)(]", "[^])]", "[]()]", "[a[)]b(](c)", "[[:alpha:]](x)", "a]"]
)
def test_balanced(regex: str) -> None:
    check_balanced(regex)


@pytest.mark.parametrize("regex", ["a)|(b", "(", ")", "[", "[]", r"[\]", r"(\)", "[()]["])
def test_not_balanced(regex: str) -> None:
    with pytest.raises(WrongGrammarError):
        check_balanced(regex)


HOSTILE = ["[" * 18_000, "(" * 18_000, "\\[" * 9_000, "[^]" * 6_000, "[a]" * 6_000, "$" * 18_000, "{1," * 6_000]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("quote", ["/", '"', ""])
def test_reading_takes_time_in_proportion(text: str, quote: str) -> None:
    gc.disable()  # a collection of all that other tests left takes a second
    before = time.thread_time()
    try:
        with suppress(NotRegularError):
            lark_regex(f"start: {quote}{text}{quote}\n" + "a: start\n" * 100)
        assert time.thread_time() - before < 30  # hundredths of a second; quadratic work takes minutes
    finally:
        gc.enable()


@pytest.mark.parametrize("grammar", ["A " * 4_900, "A" + "|A" * 4_900, "(A A)* " * 1_300])
def test_what_is_too_long_is_not_written(grammar: str) -> None:
    """All references together are millions of characters."""
    tracemalloc.start()
    try:
        with pytest.raises(NotRegularError, match="written out"):
            lark_regex(f'start: {grammar}\nA: "{"x" * 9_900}"')
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


words = st.lists(
    st.text(st.characters(max_codepoint=126, exclude_categories=["C"]), min_size=1, max_size=4), max_size=4
)


@given(words, st.text('.*+()[]{}|^$\\/"ab\n', max_size=6))
def test_texts_stand_for_themselves(parts: list[str], other: str) -> None:
    """However they are spelt: a literal is never read as an operator."""
    literals = [*parts, other]
    quoted = ['"' + part.encode("unicode_escape").decode().replace('"', '\\"') + '"' for part in literals]
    fits = re.compile(lark_regex(f"start: {' '.join(quoted)}"))
    whole = "".join(literals)
    assert fits.fullmatch(whole) and not fits.fullmatch(whole + "!") and not fits.fullmatch("!" + whole)


@given(st.text('start:ab"/|()[]?*+~0.\n%', max_size=40))
def test_any_text_is_read_or_refused(grammar: str) -> None:
    with suppress(NotRegularError):
        assert isinstance(lark_regex(f"start: {grammar}"), str)
