"""Sandbox for untrusted chat templates: Jinja's own, with limits on time and size.

The time limit is checked in every iteration of a loop and every call of a macro. The size of a text
is checked before it is built: joined, repeated, replaced, padded or formatted. A list or dict is
measured before it is printed or compared: it may contain one long text, or one list, many times.
The limits hold in the thread that renders, so nothing keeps running."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

MAX_SECONDS = 5.0  # A conversation of a million tokens takes a fraction of a second
MAX_CHARACTERS = 32 * 1024 * 1024  # limit of a text, and of the items of a list
_MAX_POWER_BITS = 4096

# Compilation has no deadline.
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


def run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Raises jinja2's SecurityError beyond a limit, and any error of the template."""
    with _time_limit():
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(variables):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
        except MemoryError:
            raise _limit_error("it needs more memory than there is") from None
    return "".join(pieces)


@contextmanager
def _time_limit() -> Iterator[None]:
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        yield
    finally:
        _deadline.reset(token)


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise _limit_error(f"it takes longer than {MAX_SECONDS:g} seconds")


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise _limit_error(f"it makes more than {MAX_CHARACTERS} characters")


def _limit_error(problem: str) -> Exception:
    from jinja2.exceptions import SecurityError

    return SecurityError(problem)


def compile_template(source: str) -> jinja2.Template:
    """Compile a template with checks of its limits. Raises jinja2.TemplateSyntaxError."""
    from jinja2 import Template

    environment = _environment()
    tree = _limiter()(environment).visit(environment.parse(source))
    return Template.from_code(
        environment, environment.compile(tree), environment.make_globals(None)
    )


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the environment that Transformers documents for chat templates, with checks."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import pass_environment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training. Here it is only a scope."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration is not a ClassVar

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def getattr(self, obj: Any, attribute: str) -> Any:
            return _checked_method(obj, attribute, super().getattr(obj, attribute))

        def getitem(self, obj: Any, argument: Any) -> Any:
            return _checked_method(obj, argument, super().getitem(obj, _checked(argument)))

        check_time = staticmethod(_check_time)

        @staticmethod
        def concatenate(*values: Any) -> str:
            texts = [str(_checked(value)) for value in values]
            _check_size(sum(map(len, texts)))
            return "".join(texts)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        finalize=_checked,
    )
    for name in environment.filters.keys() - _PASSING_FILTERS:
        check = _CHECKS.get(name, _check_values)
        environment.filters[name] = _with_check(environment.filters[name], check)
    tests: dict[str, Any] = environment.tests
    for name in _COMPARING_TESTS:
        tests[name] = _with_check(tests[name], _check_values)
    environment.filters["checked"] = _checked
    environment.filters["join"] = pass_environment(_join)
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    # lipsum makes any amount of text, urlize adds text per address, pprint is slow.
    del environment.globals["lipsum"], environment.filters["urlize"], environment.filters["pprint"]
    return environment


@functools.cache
def _limiter() -> Callable[[jinja2.Environment], Any]:
    """Return the transformer that adds the checks to a template."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Limiter(NodeTransformer):
        def __init__(self, environment: jinja2.Environment) -> None:
            self._environment = environment

        def visit_For(self, node: nodes.For) -> Any:  # noqa: N802 - visitors are found by this name
            self.generic_visit(node)
            check = nodes.ExprStmt(self._call("check_time", [], node.lineno), lineno=node.lineno)
            node.body.insert(0, check.set_environment(self._environment))
            return node

        visit_Macro = visit_CallBlock = visit_For  # noqa: N815

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            return self._call("concatenate", node.nodes, node.lineno)

        def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            operands = [node.expr, *(operand.expr for operand in node.ops)]
            # Comparing with a constant is cheap whatever the other operand contains.
            if not any(isinstance(one, nodes.Const) for one in operands):
                node.expr = self._checked(node.expr)
                for operand in node.ops:
                    operand.expr = self._checked(operand.expr)
            return node

        def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            if not isinstance(node.key, nodes.Const):
                node.key = self._checked(node.key)
            return node

        def _checked(self, node: nodes.Expr) -> nodes.Expr:
            checked = nodes.Filter(node, "checked", [], [], None, None, lineno=node.lineno)
            checked.set_environment(self._environment)
            return checked

        def _call(self, name: str, values: list[nodes.Expr], line: int) -> nodes.Call:
            function = nodes.EnvironmentAttribute(name, lineno=line)
            call = nodes.Call(function, values, [], None, None, lineno=line)
            call.set_environment(self._environment)
            return call

    return Limiter


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError for a sum, repetition or power that is too large."""
    sequences = (str, list, tuple)
    if operator == "+":
        if isinstance(left, sequences) and isinstance(right, sequences):
            _check_size(len(left) + len(right))
    elif operator == "%":
        if isinstance(left, str):
            _check_format(left, right)
    elif operator == "**":
        is_int = isinstance(left, int) and isinstance(right, int)
        if is_int and left.bit_length() * right > _MAX_POWER_BITS:
            raise _limit_error("it makes a number that is too large")
    else:
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, sequences) and isinstance(count, int):
                _check_size(len(sequence) * count)


@dataclass(slots=True)
class _PrintedSize:
    """Lower bound of a value's size in print."""

    characters: int = 0
    values: int = 0
    depth: int = 0


def _measure(value: Any) -> _PrintedSize:
    """Raises SecurityError for more than MAX_CHARACTERS, and if measuring takes too long."""
    size = _PrintedSize()
    nested = [iter((value,))]
    while nested:
        for one in nested[-1]:
            size.values += 1
            size.characters += len(one) if isinstance(one, str) else 1
            _check_size(size.characters + size.values)
            if not size.values % 4096:
                _check_time()
            if (items := _items(one)) is not None:
                nested.append(items)
                size.depth = max(size.depth, len(nested))
                break
        else:
            nested.pop()
    return size


def _items(value: Any) -> Iterator[Any] | None:
    """Return the values printed inside a value; None for a plain value."""
    if isinstance(value, dict):
        return itertools.chain.from_iterable(value.items())
    if isinstance(value, _CONTAINERS):
        items: Iterator[Any] = iter(value)
        return items
    attributes = (
        getattr(value, "_Namespace__attrs", None) if type(value).__name__ == "Namespace" else None
    )
    return None if attributes is None else iter((attributes,))


_CONTAINERS: Any = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_PLAIN_TYPES = frozenset((str, int, float, bool, type(None)))  # types of most values: a fast path


def _checked(value: Any) -> Any:
    """Return the value. Raises SecurityError if it is too large to print."""
    if type(value) not in _PLAIN_TYPES and not isinstance(value, str) and _items(value) is not None:
        _measure(value)
    return value


def _check_values(*values: Any, **named: Any) -> None:
    for value in (*values, *named.values()):
        _checked(value)


def _check_width(value: Any, width: int = 0, *_: Any) -> None:
    _checked(value)
    _check_size(width)


def _check_replaced(text: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_values(text, old, new)
    text = str(text)
    _check_size(len(text) + text.count(str(old)) * len(str(new)))


def _check_tabs(text: str, tabsize: int = 8) -> None:
    _check_size(len(text) + text.count("\t") * tabsize)


def _check_indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    text = str(_checked(s))
    columns = width if isinstance(width, int) else len(width)
    _check_size(len(text) + (text.count("\n") + 1) * columns)


def _check_wrapped(
    s: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: Any
) -> None:
    _check_size(len(str(_checked(s))) * (1 + len(wrapstring or "")))


def _check_start(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise _limit_error("sum takes numbers only")


def _check_precision(value: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > 100:
        raise _limit_error("it makes a number that is too large")


def _check_format(text: Any, *values: Any, **named: Any) -> None:
    """Refuse large widths and those from an argument (`%*d`, `{:{}}`).

    An argument can be printed once per placeholder."""
    text = str(_checked(text))
    if _WIDE_FORMAT.search(text):
        raise _limit_error("it formats with a width that is too large or comes from an argument")
    num_placeholders = text.count("%") + text.count("{")
    _check_size(len(text) + num_placeholders * _measure((values, named)).characters)


_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})|\{[^{}]*:[^{}]*(?:\{|\d{5})")
_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill", "batch", "slice", "to_bytes"), _check_width
    ),
    **dict.fromkeys(("format", "format_map"), _check_format),
    "expandtabs": _check_tabs,
    "indent": _check_indent,
    "replace": _check_replaced,
    "round": _check_precision,
    "sum": _check_start,
    "wordwrap": _check_wrapped,
}  # check of the arguments of a filter, or of a method of a text or number. The text comes first
_PASSING_FILTERS = frozenset(
    ("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random",
     "reject", "rejectattr", "reverse", "select", "selectattr")
)  # fmt: skip
"""Filters that neither print nor compare their input."""
_COMPARING_TESTS = frozenset(
    ("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le",
     "lessthan", "lower", "lt", "ne", "upper")
)  # fmt: skip
"""Tests that print or compare their input."""


def _with_check(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Return a filter or test that runs `check` first, without the argument that Jinja adds."""
    skip = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def run(*values: Any, **named: Any) -> Any:
        if type(values[skip]) not in _PLAIN_TYPES and isinstance(values[skip], Iterator):
            values = (*values[:skip], list(values[skip]), *values[skip + 1 :])
        check(*values[skip:], **named)
        return function(*values, **named)

    return run


def _checked_method(owner: Any, name: Any, method: Any) -> Any:
    if not isinstance(owner, str | bytes | int) or not callable(method):
        return method
    if name == "join" and isinstance(owner, str):
        return functools.partial(_join_values, owner)
    check = _CHECKS.get(name)
    if check is None:
        return method

    def run(*values: Any, **named: Any) -> Any:
        check(owner, *values, **named)
        return method(*values, **named)

    return run


def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: Any = None) -> str:
    from jinja2.filters import make_attrgetter

    values = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return _join_values(str(d), values)


def _join_values(separator: str, values: Any) -> str:
    texts, size = [], 0
    for value in values:
        texts.append(str(_checked(value)))
        size += len(texts[-1]) + len(separator)
        _check_size(size)
    return separator.join(texts)


def _raise_exception(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. Jinja's own filter escapes it for HTML."""
    size = _measure(value)
    indent_width = indent if isinstance(indent, int) else len(indent or "")
    separator_width = sum(map(len, separators or ()))
    per_value = indent_width * size.depth + separator_width
    _check_size(size.characters + size.values * per_value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
