"""Final answers are found in texts and compared as mathematics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.benchmarks.reasoning.grading import equal, final_answer, is_right

SAME = """
5 | 5.0
1,234 | 1234
10\\,000 | 10000
\\(3\\) | 3
-3 | \u22123
0.5 | \\frac{1}{2}
\\dfrac{3}{4} | \\frac34
\\frac{-1}{2} | -\\frac{1}{2}
\\frac{\\sqrt{3}}{3} | \\frac{1}{\\sqrt3}
\\frac{1}{\\frac{2}{3}} | 1.5
3\\frac{1}{2} | 3.5
3 1/2 | 7/2
3\\sqrt{2} | \\sqrt{18}
\\sqrt[3]{8} | 2
2^{10} | 1024
1.2 \\times 10^3 | 1200
\\frac{\\pi}{2} | 0.5\\pi
90^{\\circ} | 90\u00b0
90 degrees | 90
50\\% | 50
\\$1,200.00 | 1200
12 \\mathrm{cm}^2 | 12
30 square inches | 30
x = \\frac{1}{2} | 1/2
f(x)=x^2+1 | 1+x^2
(x+1)^2 | x^2+2x+1
2x(x-1) | 2x^2 - 2x
\\left(1, 2\\right) | (1,2)
(3, \\frac{\\pi}{2}) | \\left( 3, \\frac{\\pi}{2} \\right)
\\{1, 2\\} | \\{2,1\\}
1, 2 | 2,1
[0, \\infty) | [0,\\infty)
x \\in [1,2] | [1, 2]
\\text{Evelyn} | Evelyn
1010_{2} | 1010_2
x \\leq 3 | x\\le 3
\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} | \\begin{pmatrix}1\\\\2\\end{pmatrix}
7. | 7
\\text{(C)} | C
Option C | (C)
"""
DIFFERENT = """
5 | 6
0.33 | 1/3
1,2 | 1,2,3
(1,2) | (2,1)
(1,2) | [1,2]
[0,1) | [0,1]
\\{1,2\\} | (1,2)
\\frac{1}{2} | \\frac{2}{1}
1010_2 | 1010
Apple | A
cat | act
| 5
\\infty | -\\infty
9^9^9^9^9^9 | 1
1/0 | 1
2\\pm\\sqrt3 | 2
"""


def rows(table: str) -> list[tuple[str, str]]:
    return [
        (given.strip(), wanted.strip())
        for given, _, wanted in (line.partition("|") for line in table.strip().splitlines())
    ]


@pytest.mark.parametrize(("given", "wanted"), rows(SAME))
def test_the_same_written_in_another_way_is_equal(given: str, wanted: str) -> None:
    assert equal(given, wanted)


@pytest.mark.parametrize(("given", "wanted"), rows(DIFFERENT))
def test_what_differs_is_not_equal(given: str, wanted: str) -> None:
    assert not equal(given, wanted)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{4}.", "4"),
        (r"First \boxed{3}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{a_{1} + {b}}} more}", "a_{1} + {b}"),
        (r"\boxed{4} and then \boxed{5", "4"),
        (r"\fbox{7}", "7"),
        (r"\boxed 9 $", "9"),
        ("**Answer:** 42", "42"),
        ("The final answer is $\\frac12$", "$\\frac12$"),
        ("an answer is 3.\nAnswer: B\nThank you", "B"),
        ("work\n#### 1,234", "1,234"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_final_answer_is_found(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@given(number=st.integers(-(10**6), 10**6), below=st.integers(1, 999))
def test_numbers_are_equal_in_every_spelling(number: int, below: int) -> None:
    spelled = (
        f"{number:,}",
        f"{number}.0",
        f"\\frac{{{number * below}}}{{{below}}}",
        f"${number}$",
        f"{number} \\text{{ units}}",
    )
    assert all(is_right(f"It is \\boxed{{{one}}}.", str(number)) for one in spelled)
    assert not any(equal(one, str(number + 1)) for one in spelled)


@given(text=st.text(max_size=60), other=st.text(alphabet="\\{}frac sqrt^()[],1x/", max_size=40))
def test_no_text_breaks_the_grader(text: str, other: str) -> None:
    assert (
        is_right(f"\\boxed{{{other}", text) in (True, False)
        and equal(text, text)
        and equal(other, text) in (True, False)
    )
