"""Grades answers to problems with a known final answer: finds it in a text, and compares the two as mathematics.

Both answers are written alike by the table `ALIKE`. They are equal if their texts are, or the lists, numbers and
formulas that they denote: two formulas are the same if they have the same values at a few points.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

LONGEST = 500  # characters of an answer that are compared
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*")
_NAMED = re.compile(r"(?i)(?:####|\banswer\**\s*(?:is\b|[:=]))[\s*:]*(\S.*?)[\s*]*$")
_UNITS = (
    "square sq cubic per of degrees? radians? dollars? cents? pounds? euros? percent units? points? people students?"
    " cm mm km m meters? metres? (?:kilo|centi|milli)met(?:er|re)s? inch(?:es)? in foot feet ft yards? miles? mph"
    " kg g grams? (?:kilo)?grams? lit(?:er|re)s? ml s seconds? minutes? min hours? hrs? days? weeks? months? years?"
)
_UNIT = rf"(?:{'|'.join(_UNITS.split())})\.?(?:\s*\^\s*\{{?\d\}}?)?"
_WRAPPED = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"

ALIKE = [  # what is written in several ways, in the order in which it is replaced
    (r"\\\(|\\\)|\\\[|\\\]|\\?\$|€|£", ""),
    (r"\\(?:left|right|[bB]igg?)(?![a-zA-Z])\.?", ""),
    (r"(?<!\\)\\(?:[,;:!> ]|q?quad(?![a-zA-Z]))|~|\u2009|\u00a0", " "),
    (_WRAPPED, r" \1 "),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![a-z])|°", ""),
    (r"\\?%", ""),
    (r"\u2212|\u2013", "-"),
    (r"\\(?:cdot|times|ast)(?![a-zA-Z])|\u00d7|\u00b7", "*"),
    (r"\\(?:le|leq|leqslant)(?![a-zA-Z])", r"\\leq"),
    (r"\\(?:ge|geq|geqslant)(?![a-zA-Z])", r"\\geq"),
    (r"\\lbrace|\\lbrack", r"\\{"),
    (r"\\rbrace|\\rbrack", r"\\}"),
    (r"π|\\pi(?![a-zA-Z])", r"\\pi "),
    (r"∞", r"\\infty"),
    (r"√\s*(\w+)", r"\\sqrt{\1}"),
    (r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\w)\s*\{", r"\\frac{\1}{"),
    (r"\\frac\s*(\{[^{}]*\})\s*(\w)", r"\\frac\1{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    (r"(?<![\w.)])(\d+)\s+(\d+)\s*/\s*(\d+)", r"(\1+\2/\3)"),
    (r"(?<![\w.)])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\2/\3)"),
    (rf"(?:\s+{_UNIT})+\s*$", ""),
    (r"\b(?:and|or)\b", ","),
    (r"^\s*[a-zA-Z](?:\([a-z]\))?\s*(?:=|\\in(?![a-zA-Z]))\s*(?=[^=]*$)", ""),
    (r"[\s.]+$|\{,\}", lambda found: "," if found.group() == "{,}" else ""),
    (r"\s+", ""),
    (r"([_^])\{(\w)\}", r"\1\2"),
]
_ALIKE: list[tuple[re.Pattern[str], Any]] = [(re.compile(pattern), written) for pattern, written in ALIKE]


def final_answer(text: str) -> str | None:
    """The last `\\boxed{...}` of a text, else what its last "Answer:", "answer is" or "####" names; None without."""
    for found in reversed(list(_BOX.finditer(text))):
        if (held := _braced(text, found.end())) is not None:
            return held.strip()
    named = (_NAMED.search(line) for line in reversed(text.splitlines()))
    return next((found.group(1) for found in named if found is not None), None)


def _braced(text: str, start: int) -> str | None:
    """What the braces at `start` hold, or the word there; None if they are not closed."""
    if text[start : start + 1] != "{":
        word = re.compile(r"[^\s$.]+").match(text, start)
        return None if word is None else word.group()
    depth = 0
    for found in re.compile(r"\\[\\{}]|[{}]").finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return text[start + 1 : found.start()]
    return None


def is_right(text: str, wanted: str) -> bool:
    """Whether the final answer of `text` is `wanted`."""
    found = final_answer(text)
    return found is not None and equal(found, wanted)


def equal(given: str, wanted: str) -> bool:
    """Whether two answers are the same: letters of choices, words, numbers, formulas, lists, sets and intervals."""
    if re.fullmatch(r"\(?[A-J]\)?", wanted.strip()):
        return _choice(given) == _choice(wanted)
    return _equal(alike(given), alike(wanted))


def alike(answer: str) -> str:
    """An answer as `ALIKE` writes it."""
    answer = answer[:LONGEST]
    for pattern, written in _ALIKE:
        answer = pattern.sub(written, answer)
    return answer


def _choice(answer: str) -> str | None:
    """The letter that an answer to a question with choices begins with."""
    found = re.match(r"\W*(?:(?i:option|choice|answer)\W*)?([A-J])(?![A-Za-z])", re.sub(_WRAPPED, r"\1", answer))
    return None if found is None else found.group(1)


def _equal(given: str, wanted: str) -> bool:
    if given.casefold() == wanted.casefold():
        return True
    (opened, ours), (closed, theirs) = _listed(given), _listed(wanted)
    if len(ours) > 1 or len(theirs) > 1:
        if opened != closed or len(ours) != len(theirs):
            return False
        if opened in ("", r"\{\}"):  # their order says nothing
            return all(any(_equal(one, other) for other in theirs) for one in ours) and all(
                any(_equal(one, other) for one in ours) for other in theirs
            )
        return all(_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    return _same_values(given, wanted)


def _listed(answer: str) -> tuple[str, list[str]]:
    """The brackets of a list, and its elements; one element if it is none, or a number with commas."""
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", answer):
        return "", [answer]
    bracketed = re.fullmatch(r"(\\\{|[(\[])(.*?)(\\\}|[)\]])", answer)
    inner = bracketed.group(2) if bracketed else answer
    elements, depth = [""], 0
    for letter in inner:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:  # the outer brackets do not belong together
            return "", [answer]
        elements, separates = ([*elements, ""], True) if letter == "," and not depth else (elements, False)
        elements[-1] += "" if separates else letter
    if bracketed is None:
        return "", elements
    return (bracketed.group(1) + bracketed.group(3), elements) if len(elements) > 1 else ("", [answer])


_FORMULA: list[tuple[str, str]] = [
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))"),
    (r"\\sqrt\[(\w+)\]\{([^{}]*)\}", r"((\2)**(1/(\1)))"),
    (r"\\sqrt\{([^{}]*)\}", r"((\1)**(0.5))"),
    (r"\^\{([^{}]*)\}", r"**(\1)"),
]
_POINTS = [
    {letter: 0.7 + 0.313 * at**1.3 + shift for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    for shift in (0, 1.9)
]
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _same_values(given: str, wanted: str) -> bool:
    try:
        ours, theirs = _formula(given), _formula(wanted)
        pairs = [(_value(ours, point), _value(theirs, point)) for point in _POINTS]
        return all(abs(one - other) <= 1e-9 * max(1.0, abs(other)) for one, other in pairs)
    except (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError):  # no formula, or a hostile one
        return False


def _formula(answer: str) -> ast.expr:
    """An answer as an expression of Python's. Raises `ValueError` or `SyntaxError` for one that is no formula."""
    text, before = re.sub(r"(?<=\d),(?=\d{3})", "", answer), ""
    while text != before:  # from the innermost braces on
        before = text
        for pattern, written in _FORMULA:
            text = re.sub(pattern, written, text)
    text = text.replace("^", "**").replace(r"\pi", "(3.141592653589793)")
    if re.search(r"[^\w.+\-*/()]|_|[A-Za-z]{3}", text) or not text.isascii():
        raise ValueError(f"no formula: {answer}")
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", text)
    text = re.sub(r"(?<=[\d.)])(?=[A-Za-z(])|(?<=[A-Za-z])(?=[A-Za-z\d(])|(?<=\))(?=\d)", "*", text)
    return ast.parse(text, mode="eval").body


def _value(formula: ast.expr, point: dict[str, float]) -> complex:
    """The value of a formula at a point. Raises `ValueError` and `ArithmeticError`."""
    match formula:
        case ast.Constant(value=int() | float() as number):
            return complex(float(number))
        case ast.Name(id=letter) if letter.lower() in point:
            return complex(point[letter.lower()] + 0.11 * letter.isupper())
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return complex(_OPERATORS[type(op)](_value(operand, point)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return complex(_OPERATORS[type(op)](_value(left, point), _value(right, point)))
    raise ValueError("no formula")
