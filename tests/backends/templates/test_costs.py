"""Nothing that a template may call takes more than a bounded time beyond what it was counted for, whatever its input."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from agentspec.backends.templates import costs, sandbox
from agentspec.backends.templates.budget import Budget, TemplateLimitError
from agentspec.backends.templates.huggingface import TemplateDict
from agentspec.backends.templates.sandbox import BoundedEnvironment

SECONDS = 1.0  # processor time of one operation that was let through; the budget of a rendering, and then some
MOST_BYTES = 160 << 20  # that one operation holds at a time, of inputs of a few megabytes
SIZES = (1_000, 30_000, 1_000_000)

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
    yield from (("operator", name) for name in ("+", "-", "*", "%", "**", "~", "==", "in", "<", "[]", "dict", "loop"))


TEMPLATES = {
    "filter": "{% set _ = value|NAME(*args, **named) %}{{ (value|NAME(*args, **named)|list|length) if again else 1 }}",
    "test": "{{ (value is NAME(*args)) }}{{ [value, value]|select('NAME', *args)|list|length if again else 1 }}",
    "method": "{{ value.NAME(*args, **named)|length }}",
    "operator": "{{ (value NAME args[0])|string|length }}",
}
WRITTEN = {
    "[]": "{{ {'a': 1}[args[0]] }}{{ value[args[0]:]|length }}",
    "dict": "{{ dict(value)|length }}{{ dict.fromkeys(value)|length }}",
    "loop": "{% for a in [value] recursive %}{{ loop(a) if a is iterable and a is not string }}{% endfor %}",
}


@pytest.mark.parametrize("size", [SIZES[0], pytest.param(SIZES[1]), pytest.param(SIZES[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_no_operation_takes_longer_than_it_was_counted_for(kind: str, size: int) -> None:
    """A rendering ends in a text, in a refusal, or in an error of Python's; never late, and never with much memory."""
    environment = BoundedEnvironment()
    environment.filters["tojson"] = environment.filters["tojson"]
    environment.globals["dict"], environment.plain_functions = TemplateDict(), (TemplateDict,)
    late: list[Any] = []
    given, tried = values(size), arguments(size)
    for _, name in (one for one in operations() if one[0] == kind):
        template = environment.load(WRITTEN.get(name, TEMPLATES[kind].replace("NAME", name)))
        for label, value in given.items():
            for args, named in (*((args, {}) for args in tried), *(((), named) for named in NAMED.get(name, []))):
                seconds = spent(environment, template, value=value, args=args, named=named, again=True)
                if seconds > SECONDS:
                    late.append((name, label, str(args)[:40], len(args), str(named)[:40], round(seconds, 2)))
    assert late == []


def spent(environment: BoundedEnvironment, template: Any, **given: Value) -> float:
    """Processor time of a rendering; errors are what a hostile template ends in."""
    started = time.thread_time()
    try:
        environment.render(template, given)
    except MemoryError:
        raise
    except Exception:
        pass
    return time.thread_time() - started
