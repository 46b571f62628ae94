"""Nothing that a template may call takes longer than what it was counted for allows, whatever it is given."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from agentspec.backends.templates import costs, huggingface
from agentspec.backends.templates.budget import Budget, TemplateLimitError, spending
from agentspec.backends.templates.huggingface import TemplateDict
from agentspec.backends.templates.sandbox import BoundedEnvironment

LEFT = 0.2  # seconds of a rendering that are left when an operation begins
SECONDS = 5.0  # processor time of one operation that was let through, on whatever machine; unbounded ones take more

Value = Any


def collisions(count: int) -> list[int]:
    return [((1 << 61) - 1) * number for number in range(count)]


def values(n: int) -> Mapping[str, Value]:
    """Texts and collections of about `n` characters or elements, each bad for some algorithm."""
    few = min(n, 100_000)
    return {
        "one letter": "a" * n,
        "another end": "a" * n + "b",
        "blanks": " " * n,
        "words": "a " * (n // 2),
        "letters beyond Latin-1": "é\u4e16" * (n // 2),
        "lines": "ab\n" * (n // 3),
        "links": "http://a.bc " * (n // 12),
        "tags": "<!-- -->" * (n // 8),
        "open tags": "<!--" * (n // 4),
        "more than": "<" * n,
        "entities": "&a" * (n // 2),
        "format": "{0}" * (n // 3),
        "percents": "%s" * (n // 2),
        "digits": "9" * n,
        "bytes": b"a" * n,
        "numbers": list(range(few)),
        "texts": ["a" * 20 + str(index) for index in range(few // 10)],
        "equal texts": ["".join(["a"] * 1000) for _ in range(few // 1000 + 1)],
        "lists": [[index] for index in range(few // 2)],
        "colliding numbers": collisions(few),
        "pairs with colliding keys": [(key, 1) for key in collisions(few)],
        "a dict": {str(index): index for index in range(few)},
        "a deep list": deep(min(n, 900)),
    }


def deep(levels: int) -> list[Any]:
    made: list[Any] = list(range(1000))
    for _ in range(levels):
        made = [made]
    return made


def arguments(n: int) -> list[tuple[Value, ...]]:
    few, texts = min(n, 100_000), list(values(n).values())
    some = [texts[index] for index in (0, 1, 2, 4, 6, 14, 15, 16, 19, 20, 21)]
    return [
        (),
        (0,),
        (64,),
        (n,),
        (10**9,),
        (n, "ab"),
        *((one,) for one in some),
        *((one, "x" * n) for one in ("a", "a" * n)),
        ("a" * (n // 2), "b"),
        (collisions(few),),
        ("utf-8", "backslashreplace"),
        ("punycode",),
        ("idna",),
    ]


NAMED: Mapping[str, list[dict[str, Value]]] = {
    "tojson": [{"indent": 64}, {"separators": ("x" * 1000, ":")}, {"sort_keys": True, "indent": 60}],
    "indent": [{"width": 10**9}, {"first": True, "width": 10**6}, {"width": "x" * 10**5}],
    "expandtabs": [{"tabsize": 10**9}],
    "to_bytes": [{"length": 10**9, "byteorder": "big"}],
    "urlize": [{"rel": "x" * 10**5}, {"target": "x" * 10**5}, {"extra_schemes": ["x:"] * 10**4}],
    "wordwrap": [{"width": 1}, {"width": 1, "wrapstring": "x" * 10**5}],
    "truncate": [{"length": 10**9}, {"end": "x" * 10**6}],
    "sort": [{"attribute": "a" + ".a" * 10**5}, {"attribute": ",".join("a" * 1000)}],
    "map": [{"attribute": "a" + ".a" * 10**5, "default": {}}],
    "unique": [{"attribute": "a"}],
    "groupby": [{"attribute": "a" + ".a" * 10**5, "default": {}}],
    "sum": [{"start": []}, {"start": ""}],
    "batch": [{"linecount": 1, "fill_with": 1}],
    "split": [{"maxsplit": 10**9}],
    "round": [{"precision": 10**9}, {"precision": 300, "method": "ceil"}],
}  # fmt: skip


def operations() -> Iterator[tuple[str, str]]:
    environment = BoundedEnvironment()
    yield from (("filter", name) for name in sorted({*environment.filters, "tojson"}))
    yield from (("test", name) for name in sorted(environment.tests))
    kinds: list[Any] = [str, bytes, int, float, list, tuple, dict, range, type({}.keys()), type({}.items())]
    yield from (("method", name) for name in sorted({name for kind in kinds for name in dir(kind)}) if name[0] != "_")
    yield from (("operator", name) for name in ("+", "-", "*", "%", "**", "~", "==", "in", "<", "[]", "dict"))


EMPTY = BoundedEnvironment().from_string("")


def applied(environment: BoundedEnvironment, kind: str, name: str, value: Value, args: Any, named: Any) -> Any:
    """Do to `value` what a template would do, and go through what comes of it."""
    context: Any = EMPTY.new_context({})
    if kind == "method":
        return environment.call(context, environment.getattr(value, name), *args, **named)
    if kind == "operator":
        return operated(environment, context, name, value, *args)
    if kind == "test":
        function = environment.tests[name]
        passed = (environment,) if hasattr(function, "jinja_pass_arg") else ()
        return function(*passed, value, *args)
    made = environment.call_filter(name, value, args, named, context)
    return sum(1 for _ in made) if isinstance(made, Iterator) else made


def operated(environment: BoundedEnvironment, context: Any, name: str, value: Value, *args: Value) -> Any:
    if name in environment.intercepted_binops:
        return environment.call_binop(context, name, value, args[0])
    if name == "~":
        return environment.concatenated(value, *args)
    if name == "[]":
        return environment.getitem(value, args[0])
    if name == "dict":
        return environment.call(context, TemplateDict(), value)
    return environment.compared(name, args[0], value)


@pytest.mark.parametrize(
    "size", [3_000, pytest.param(20_000, marks=pytest.mark.long), pytest.param(1_000_000, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("kind", ["filter", "test", "method", "operator"])
def test_no_operation_takes_longer_than_it_was_counted_for(kind: str, size: int) -> None:
    """It ends in a value, in a refusal, or in an error of Python's, and never late."""
    environment = BoundedEnvironment()
    environment.plain_functions = (TemplateDict,)
    environment.filters["tojson"] = huggingface._ENVIRONMENT.filters["tojson"]
    late: list[Any] = []
    given, tried = values(size), [(args, {}) for args in arguments(size)]
    known = weighed(*given.values(), *(one for args, _ in tried for one in args))
    step = {3_000: 29, 20_000: 7}.get(size, 1)  # a part of all in the shorter forms
    for name in (name for one, name in operations() if one == kind):
        ways = tried + [((), named) for named in NAMED.get(name, [])]
        for place, ((label, value), (args, named)) in enumerate(itertools.product(given.items(), ways)):
            if (place + len(name)) % step or (kind == "method" and not hasattr(value, name)):
                continue
            seconds, refused = spent(known, environment, kind, name, value, args, named)
            if seconds > SECONDS:
                late.append((name, label, str(args)[:40], len(args), str(named)[:40], round(seconds, 2), refused))
    assert late == []


def weighed(*given: Value) -> Budget:
    """A budget that has weighed all that is given, as that of a rendering has."""
    budget = Budget(0, time.thread_time() + 60.0)
    for value in given:
        budget.weigh_given(value)
    return budget


def spent(known: Budget, environment: BoundedEnvironment, kind: str, name: str, *given: Value) -> tuple[float, bool]:
    """Processor time of an operation, and whether it was refused."""
    started = time.thread_time()
    budget = replace(known, bytes_left=64 << 20, ends=started + LEFT, _weights=dict(known._weights))
    try:
        with spending(budget):
            applied(environment, kind, name, *given)
    except TemplateLimitError:
        return time.thread_time() - started, True
    except MemoryError:
        raise
    except Exception:
        pass
    return time.thread_time() - started, False


@pytest.mark.parametrize("table", [costs.FILTERS, costs.TESTS, costs.METHODS])
def test_every_cost_belongs_to_something(table: Mapping[str, Any]) -> None:
    """A misspelled name would leave the operation at the cost of an unknown one."""
    assert table.keys() <= {name for _, name in operations()}


def test_what_is_not_listed_is_taken_to_be_quadratic() -> None:
    environment = BoundedEnvironment()
    environment.filters["new"] = lambda value: value
    environment.guard_filters()
    template = environment.load("{{ value|new|length }}")
    assert environment.render(template, {"value": "x" * 10_000}) == "10000"
    with pytest.raises(TemplateLimitError, match="too much work"):
        environment.render(template, {"value": "x" * 20_000})
