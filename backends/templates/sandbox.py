"""A sandbox for chat templates that bounds what they compute, and renders as Jinja's own does within these bounds.

Jinja's sandbox keeps templates from code and files. Here every loop, call, filter, test, operator and look-up also
spends a `Budget`, before it begins and by the sizes of what it is given: the template is rewritten after parsing, so
that loops, comparisons, `~` and containers pass through the environment too.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from functools import wraps
from typing import Any

from jinja2 import Template, Undefined, nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from agentspec.backends.templates.budget import (
    MAX_RENDERED,
    Budget,
    TemplateLimitError,
    current,
    spending,
)
from agentspec.backends.templates.costs import (
    ELEMENT,
    comparison,
    contains,
    hashing,
    method_cost,
    quadratic,
    size,
    sizes,
)
from agentspec.backends.templates.costs import FILTERS as FILTER_COSTS
from agentspec.backends.templates.costs import TESTS as TEST_COSTS
from agentspec.backends.templates.guards import FILTERS, METHODS, OPERATORS, check_format, check_spec, has_nested_fields

_BUFFERED = (nodes.Block, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda item, items: item in items,
    "notin": lambda item, items: item not in items,
}
_DONE: dict[type[nodes.Node], tuple[str, ...]] = {nodes.For: ("iter",), nodes.Compare: ("expr", "ops")}
_TUPLE = 200_000  # units of work: CPython hashes tuples in tuples by recursion, and 100,000 of them end the process
_MAX_SOURCE = 100_000  # characters of a template
_BUILT_IN = (str, bytes, int, float, list, tuple, dict, range, KeysView, ItemsView, ValuesView, type)
_LAZY = frozenset({"map", "select", "reject", "selectattr", "rejectattr", "first", "default", "d", "attr", "items"})


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget for each rendering. `render` renders its templates."""

    intercepted_binops = frozenset(OPERATORS)
    plain_functions: tuple[type, ...] = (type,)  # of the kind of `dict`, which look at what they are given at once

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        self.globals.pop("lipsum", None)  # random text, as long as a template asks
        self.guard_filters()

    def guard_filters(self) -> None:
        """Bound the filters and tests; call it again after adding some."""
        self.filters = {name: guarded_filter(name, function) for name, function in self.filters.items()}
        tests: Any = self.tests  # typed as plain functions
        self.tests = {name: guarded_test(name, function) for name, function in tests.items()}

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
        budget.work(budget.spend_text(*parts))
        return "".join(map(str, parts))

    def charged(self, value: Any) -> Any:
        """A list, tuple, dict or text that the template spells out, or a slice."""
        budget = current()
        budget.work(_TUPLE if type(value) is tuple else 0)
        return budget.charge(value)

    def compared(self, compare: str, left: Any, right: Any) -> Any:
        """The value of `left == right`, `left in right` and the like."""
        budget = current()
        cost = contains(budget, right, left) if compare in ("in", "notin") else comparison(budget, left, right)
        budget.work(cost)
        return _COMPARED[compare](left, right)

    def timed(self, value: Any) -> Any:
        """What the template is about to compare with several others, one after another."""
        budget = current()
        budget.work(ELEMENT * size(budget, value))
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        budget = current()
        budget.work(0 if isinstance(argument, (str, int)) else size(budget, argument))
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        current().work()
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)  # without the variables of the loop, which are for templates' own functions
        budget = current()
        plain = isinstance(__obj, __self.plain_functions) or isinstance(owner, __self.plain_functions)
        built_in = plain or isinstance(owner, _BUILT_IN)
        if built_in:
            args = tuple(map(_made, args))
        elif isinstance(__obj, LoopContext):  # a recursive loop
            args = tuple(map(__self.ticked, args[:1])) + args[1:]
        given = (*args, *kwargs.values())
        if not built_in:
            budget.work(ELEMENT * len(given) + (sizes(budget, given) if isinstance(owner, LoopContext) else 0))
        elif plain:
            budget.work(hashing(budget, args[0] if args else ()) + sizes(budget, given))
        else:
            name = getattr(__obj, "__name__", "")
            budget.work(method_cost(budget, owner, name, given))
            check = METHODS.get(name)
            if check is not None and isinstance(owner, (str, bytes, int)):
                check(budget, owner, given)
        return budget.charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        budget.work()
        OPERATORS[operator](budget, left, right)
        return budget.charge(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, format, mapped = value.__self__, wrapped, value.__name__ == "format_map"

        @wraps(format)
        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(current(), text, (*args, *kwargs.values()))
            if has_nested_fields(text):
                _CheckedFormatter(self).vformat(text, () if mapped else args, args[0] if mapped and args else kwargs)
            return format(*args, **kwargs)

        return bounded

    def _bounded(self, template: nodes.Template) -> nodes.Template:
        """Rewrite a template so that loops, `~`, containers and texts in buffers pass through this environment."""
        _rewrite(template)
        template.set_environment(self)
        return template


class _CheckedFormatter(SandboxedFormatter):
    """Formats to see the widths that are made of values: a text, or several numbers one behind the other."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_spec(current(), format_spec)
        return super().format_field(value, format_spec)


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
        budget.work()
        yield item


def _written(value: Any) -> Any:
    """Count what a template is about to write as text."""
    budget = current()
    if isinstance(value, str):
        budget.spend(len(value))
    elif not isinstance(value, (int, float, bool, type(None))):
        budget.work(budget.spend_text(value))
    return value


def _made(value: Any) -> Any:
    """What can be gone through, made into a list so that it can be counted; other values as they are."""
    countable = isinstance(value, (str, bytes, list, tuple, dict, set, frozenset)) or not isinstance(value, Iterable)
    return value if countable or isinstance(value, (Undefined, Namespace)) else list(value)


def guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that spends the budget before it begins, and for each element that it yields."""
    cost, check = FILTER_COSTS.get(name, quadratic), FILTERS.get(name)

    def before(budget: Budget, value: Any, args: Sequence[Any]) -> None:
        budget.work(cost(budget, value, args))
        if check is not None:
            check(budget, value, args)

    return _guarded(function, before, made=name not in _LAZY)


def guarded_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that spends the budget before it begins."""
    cost = TEST_COSTS.get(name, quadratic)
    return _guarded(function, lambda budget, value, args: budget.work(cost(budget, value, args)), made=False)


def _guarded(
    function: Callable[..., Any], before: Callable[[Budget, Any, Sequence[Any]], None], *, made: bool
) -> Callable[..., Any]:
    """`function` with `before` called first, with its value and all further arguments in order. Jinja passes some
    functions a context or an environment before the value.
    """
    if getattr(function, "guarded", False):
        return function
    leading, ordered = int(hasattr(function, "jinja_pass_arg")), _in_order(function)

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        if len(args) > leading:
            if made:
                args = (*args[:leading], _made(args[leading]), *args[leading + 1 :])
            before(budget, args[leading], ordered(args, kwargs)[leading + 1 :])
        result = function(*args, **kwargs)
        return _ticking(result, budget) if isinstance(result, types.GeneratorType) else budget.charge(result)

    guarded.guarded = True  # type: ignore[attr-defined]
    return guarded


def _in_order(function: Callable[..., Any]) -> Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]]:
    """How to put named arguments of `function` where they would stand without their names."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return lambda args, kwargs: (*args, *kwargs.values())

    def ordered(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        if not kwargs:
            return args
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the call will say so
            return (*args, *kwargs.values())
        bound.apply_defaults()
        return (*bound.args, *bound.kwargs.values())

    return ordered


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
            for operand in node.ops:
                operand.expr = _through("timed", [_replaced(operand.expr, buffered, stack)])
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
    if isinstance(node, nodes.Compare) and len(node.ops) == 1:
        stack.pop()
        operand = node.ops[0]
        call = _through("compared", [nodes.Const(operand.op, lineno=node.lineno), node.expr, operand.expr])
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
