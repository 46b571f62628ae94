"""A sandbox for chat templates that bounds what they compute, and renders as Jinja's own does within these bounds.

Jinja's sandbox keeps templates from code and files. Here every loop, call, filter and operator also spends a `Budget`:
the template is rewritten after parsing, so that loops, `~` and containers pass through the environment too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import Template, Undefined, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from agentspec.backends.templates.budget import (
    MAX_RENDERED,
    Budget,
    TemplateLimitError,
    current,
    spending,
)
from agentspec.backends.templates.guards import FILTERS, METHODS, OPERATORS, check_format

_BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
_DONE: dict[type[nodes.Node], tuple[str, ...]] = {nodes.For: ("iter",), nodes.Compare: ("expr",)}
_MAX_SOURCE = 100_000  # characters of a template


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget for each rendering. `render` renders its templates."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        self.globals.pop("lipsum", None)  # random text, as long as a template asks
        self.guard_filters()

    def guard_filters(self) -> None:
        """Bound the filters; call it again after adding some."""
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}

    def load(self, source: str) -> Template:
        """Parse and compile a template. Raises what Jinja raises, and `TemplateLimitError`."""
        if len(source) > _MAX_SOURCE:
            raise TemplateLimitError(f"the chat template is longer than {_MAX_SOURCE:,} characters")
        with spending(Budget.of(source)):
            return self.from_string(self._bounded(self.parse(source)))

    def render(self, template: Template, given: Mapping[str, Any]) -> str:
        """The text that a template of `load` makes. Raises `TemplateLimitError`, and what Jinja and Python raise."""
        parts: list[str] = []
        size = 0
        with spending(Budget.of(dict(given))):
            for part in template.generate(given):
                size += len(part)
                if size > MAX_RENDERED:
                    raise TemplateLimitError(f"the prompt is longer than {MAX_RENDERED:,} characters")
                parts.append(part)
        return "".join(parts)

    def ticked(self, iterable: Iterable[Any]) -> Iterable[Any]:
        """What a loop goes through."""
        return _Ticked(iterable, current()) if hasattr(iterable, "__len__") else _ticks(iterable, current())

    def concatenated(self, *parts: Any) -> str:
        """The value of `a ~ b`."""
        budget = current()
        budget.spend(sum(map(budget.weigh, parts)))
        return "".join(map(str, parts))

    def charged(self, value: Any) -> Any:
        """A list, tuple, dict or text that the template spells out, or a slice."""
        budget = current()
        budget.tick()
        return budget.charge(value)

    def timed(self, value: Any) -> Any:
        """What the template is about to compare."""
        current().tick(_size(value))
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)  # without the variables of the loop, which are for templates' own functions
        budget = current()
        budget.tick(_size(owner))
        if isinstance(owner, (str, bytes, int)):
            check = METHODS.get(getattr(__obj, "__name__", ""))
            if check is not None:
                check(budget, owner, args := tuple(map(_made, args)))
        return budget.charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        budget.tick()
        OPERATORS[operator](budget, left, right)
        return budget.charge(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, format = value.__self__, wrapped

        @wraps(format)
        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(current(), text, (*args, *kwargs.values()))
            return format(*args, **kwargs)

        return bounded

    def _bounded(self, template: nodes.Template) -> nodes.Template:
        """Rewrite a template so that loops, `~`, containers and texts in buffers pass through this environment."""
        _rewrite(template)
        template.set_environment(self)
        return template


class _Ticked:
    """A collection whose loop spends time. `loop.length` and the like ask for its length."""

    def __init__(self, items: Any, budget: Budget) -> None:
        self._items, self._budget = items, budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _ticks(self._items, self._budget)


def _ticks(items: Iterable[Any], budget: Budget) -> Iterator[Any]:
    iterator = iter(items)  # raises here, where the loop begins, for what cannot be gone through
    return _ticking(iterator, budget)


def _ticking(iterator: Iterator[Any], budget: Budget) -> Iterator[Any]:
    for item in iterator:
        budget.tick()
        yield item


def _written(value: Any) -> Any:
    """Count what a template is about to write as text."""
    budget = current()
    if isinstance(value, str):
        budget.spend(len(value))
    elif not isinstance(value, (int, float, bool, type(None))):
        budget.spend(budget.weigh(value))
    return value


def _size(value: Any) -> int:
    """How much there is to go through in a text or collection, about in bytes."""
    return len(value) if isinstance(value, str) else 16 * len(value) if isinstance(value, (list, tuple, dict)) else 0


def _made(value: Any) -> Any:
    """What can be gone through, made into a list so that it can be counted; other values as they are."""
    countable = isinstance(value, (str, bytes, list, tuple, dict, set, frozenset)) or not isinstance(value, Iterable)
    return value if countable or isinstance(value, (Undefined, Namespace)) else list(value)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that spends the budget. Jinja passes some filters a context or an environment before the value."""
    if getattr(function, "guarded", False):
        return function
    check, leading = FILTERS.get(name), int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.tick(_size(args[leading]) if len(args) > leading else 0)
        if len(args) > leading:
            given = args[leading]
            if check is not None or name in ("sum", "list"):
                given = _made(given)
                args = (*args[:leading], given, *args[leading + 1 :])
            if check is not None:
                check(budget, given, (*args[leading + 1 :], *kwargs.values()))
            if name == "sum":
                _check_sum(budget, given)
            if name in ("string", "pprint"):
                budget.spend(budget.weigh(given))
        result = function(*args, **kwargs)
        return result if isinstance(result, types.GeneratorType) else budget.charge(result)

    guarded.guarded = True  # type: ignore[attr-defined]
    return guarded


def _check_sum(budget: Budget, items: Any) -> None:
    """Adding texts or lists one by one copies what was added before each time."""
    if isinstance(items, (list, tuple)) and any(isinstance(item, (list, tuple, str)) for item in items):
        budget.spend(len(items) * budget.weigh(items))


def _rewrite(root: nodes.Node) -> None:
    """Rewrite below `root`. Not recursive: the parser has bounded the depth, but far above what is needed here."""
    stack: list[tuple[nodes.Node, bool]] = [(root, False)]
    while stack:
        node, buffered = stack.pop()
        buffered = buffered or isinstance(node, _BUFFERED) or (isinstance(node, nodes.For) and node.recursive)
        if isinstance(node, nodes.For):
            node.iter = _through("ticked", [_replaced(node.iter, buffered, stack)])
        elif isinstance(node, nodes.Compare):
            node.expr = _through("timed", [_replaced(node.expr, buffered, stack)])
        for field, value in node.iter_fields(exclude=_DONE.get(type(node), ())):
            if isinstance(value, nodes.Node):
                setattr(node, field, _replaced(value, buffered, stack))
            elif isinstance(value, list):
                value[:] = [_replaced(one, buffered, stack) if isinstance(one, nodes.Node) else one for one in value]


def _replaced(node: Any, buffered: bool, stack: list[tuple[nodes.Node, bool]]) -> Any:
    """What stands for `node`, whose children are put on the stack."""
    stack.append((node, buffered))
    if isinstance(node, nodes.Concat):
        stack.pop()
        call = _through("concatenated", node.nodes)
        stack.append((call, buffered))
        return call
    if isinstance(node, nodes.TemplateData) and buffered:
        stack.pop()
        return _through("charged", [nodes.Const(node.data, lineno=node.lineno)])
    spelled = isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    if spelled and any(not isinstance(child, (nodes.Const, nodes.Pair)) for child in node.iter_child_nodes()):
        return _through("charged", [node])
    sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    if sliced or (isinstance(node, nodes.Dict) and node.items):
        return _through("charged", [node])
    return node


def _through(method: str, args: list[nodes.Expr]) -> nodes.Call:
    """A call of a method of the environment."""
    line = args[0].lineno if args else 0
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, args, [], None, None, lineno=line)
