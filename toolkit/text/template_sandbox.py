"""Where chat templates run, as nobody trusts them: Jinja's sandbox, for at most SECONDS, making at most CHARACTERS.

The time is looked at in every turn of a loop and every call of a macro. What grows by joining, repeating, replacing,
padding or formatting is measured before it is made, and a list or table is weighed before it is written out or compared:
it may have one long text, or one list, many times. So the bounds hold in the thread that renders, and nothing is left
running.
"""

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

SECONDS = 5.0
"""A conversation of a million tokens takes a fraction of a second."""
CHARACTERS = 32 * 1024 * 1024
"""The longest text, and the most items of a list."""
_BITS = 4096
"""The largest power, in bits."""

_deadline: ContextVar[float] = ContextVar(
    "deadline", default=math.inf
)  # templates are compiled without one


def run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    with _time_limit():
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(variables):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
        except MemoryError:
            raise _too_much("it takes more memory than there is") from None
    return "".join(pieces)


@contextmanager
def _time_limit() -> Iterator[None]:
    token = _deadline.set(time.monotonic() + SECONDS)
    try:
        yield
    finally:
        _deadline.reset(token)


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise _too_much(f"it takes longer than {SECONDS:g} seconds")


def _check_size(size: int) -> None:
    if size > CHARACTERS:
        raise _too_much(f"it makes more than {CHARACTERS} characters")


def _too_much(what: str) -> Exception:
    from jinja2.exceptions import SecurityError

    return SecurityError(what)


def compile_template(source: str) -> jinja2.Template:
    """The template with its limits built in. Raises jinja2.TemplateSyntaxError."""
    from jinja2 import Template

    environment = _environment()
    tree = _bound()(environment).visit(environment.parse(source))
    return Template.from_code(
        environment, environment.compile(tree), environment.make_globals(None)
    )


@functools.cache
def _environment() -> jinja2.Environment:
    """What Transformers documents for chat templates, in a sandbox that measures what grows."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import pass_environment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant wrote, for training; here it is only a scope."""

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
            return _measured_method(obj, attribute, super().getattr(obj, attribute))

        def getitem(self, obj: Any, argument: Any) -> Any:
            return _measured_method(obj, argument, super().getitem(obj, _weighed(argument)))

        check_time = staticmethod(_check_time)

        @staticmethod
        def concatenate(*values: Any) -> str:
            texts = [str(_weighed(value)) for value in values]
            _check_size(sum(map(len, texts)))
            return "".join(texts)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        finalize=_weighed,
    )
    for name in environment.filters.keys() - _HAND_ON:
        check = _CHECKS.get(name, _check_weights)
        environment.filters[name] = _measured(environment.filters[name], check)
    tests: dict[str, Any] = environment.tests
    for name in _COMPARING:
        tests[name] = _measured(tests[name], _check_weights)
    environment.filters["weighed"] = _weighed
    environment.filters["join"] = pass_environment(_join)
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    del environment.globals["lipsum"]  # makes as much text as it is asked for
    del (
        environment.filters["urlize"],
        environment.filters["pprint"],
    )  # the same, for each address, or slowly
    return environment


@functools.cache
def _bound() -> Callable[[jinja2.Environment], Any]:
    """Makes the transformer that builds the limits into a template."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Bound(NodeTransformer):
        def __init__(self, environment: jinja2.Environment) -> None:
            self._environment = environment

        def visit_For(self, node: nodes.For) -> Any:  # noqa: N802 - visitors are found by this name
            return self._timed(node)

        visit_Macro = visit_CallBlock = visit_For  # noqa: N815

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            return self._call("concatenate", node.nodes, node.lineno)

        def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
            """What is compared with a text or a number is not looked into."""
            self.generic_visit(node)
            operands = [node.expr, *(operand.expr for operand in node.ops)]
            if not any(isinstance(one, nodes.Const) for one in operands):
                node.expr = self._weighed(node.expr)
                for operand in node.ops:
                    operand.expr = self._weighed(operand.expr)
            return node

        def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            if not isinstance(node.key, nodes.Const):
                node.key = self._weighed(node.key)
            return node

        def _weighed(self, node: nodes.Expr) -> nodes.Expr:
            made = nodes.Filter(node, "weighed", [], [], None, None, lineno=node.lineno)
            made.set_environment(self._environment)
            return made

        def _timed(self, node: Any) -> Any:
            self.generic_visit(node)
            check = nodes.ExprStmt(self._call("check_time", [], node.lineno), lineno=node.lineno)
            node.body.insert(0, check.set_environment(self._environment))
            return node

        def _call(self, name: str, values: list[nodes.Expr], line: int) -> nodes.Call:
            function = nodes.EnvironmentAttribute(name, lineno=line)
            call = nodes.Call(function, values, [], None, None, lineno=line)
            call.set_environment(self._environment)
            return call

    return Bound


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError for a sum, a repetition or a power that would be out of all proportion."""
    kinds = (str, list, tuple)
    if operator == "+":
        if isinstance(left, kinds) and isinstance(right, kinds):
            _check_size(len(left) + len(right))
    elif operator == "%":
        if isinstance(left, str):
            _check_format(left, right)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _BITS:
            raise _too_much("it makes a number that is too large")
    else:
        for many, count in ((left, right), (right, left)):
            if isinstance(many, kinds) and isinstance(count, int):
                _check_size(len(many) * count)


@dataclass(slots=True)
class _Weight:
    """What a value comes to when it is written, at least."""

    characters: int = 0
    values: int = 0
    depth: int = 0


def _weight(value: Any) -> _Weight:
    """Raises SecurityError for more than CHARACTERS, or when it takes too long to find out."""
    weight = _Weight()
    nested = [iter((value,))]
    while nested:
        for one in nested[-1]:
            weight.values += 1
            weight.characters += len(one) if isinstance(one, str) else 1
            _check_size(weight.characters + weight.values)
            if not weight.values % 4096:
                _check_time()
            if (inner := _inside(one)) is not None:
                nested.append(inner)
                weight.depth = max(weight.depth, len(nested))
                break
        else:
            nested.pop()
    return weight


def _inside(value: Any) -> Iterator[Any] | None:
    """What is written of a value besides itself; None for nothing."""
    if isinstance(value, dict):
        return itertools.chain.from_iterable(value.items())
    if isinstance(value, _CONTAINERS):
        within: Iterator[Any] = iter(value)
        return within
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
_LIGHT = frozenset((str, int, float, bool, type(None)))
"""What most values are."""


def _weighed(value: Any) -> Any:
    """The value itself. Raises SecurityError for one that must not be written."""
    if type(value) not in _LIGHT and not isinstance(value, str) and _inside(value) is not None:
        _weight(value)
    return value


def _check_weights(*values: Any, **named: Any) -> None:
    for value in (*values, *named.values()):
        _weighed(value)


def _check_width(value: Any, width: int = 0, *_: Any) -> None:
    _weighed(value)
    _check_size(width)


def _check_replaced(text: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_weights(text, old, new)
    text = str(text)
    _check_size(len(text) + text.count(str(old)) * len(str(new)))


def _check_tabs(text: str, tabsize: int = 8) -> None:
    _check_size(len(text) + text.count("\t") * tabsize)


def _check_indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    text = str(_weighed(s))
    _check_size(
        len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width))
    )


def _check_wrapped(
    s: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: Any
) -> None:
    _check_size(len(str(_weighed(s))) * (1 + len(wrapstring or "")))


def _check_start(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise _too_much("sum adds numbers only")


def _check_precision(value: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > 100:
        raise _too_much("it makes a number that is too large")


def _check_format(text: Any, *values: Any, **named: Any) -> None:
    """A width can also come from an argument: `%*d`, or `{:{}}`. An argument can be written many times."""
    text = str(_weighed(text))
    if _WIDE.search(text):
        raise _too_much("it formats to a width of its own making")
    _check_size(
        len(text) + (text.count("%") + text.count("{")) * _weight((values, named)).characters
    )


_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})|\{[^{}]*:[^{}]*(?:\{|\d{5})")
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
}
"""Of filters, and of methods of texts and numbers: what measures their arguments, the first of which is the text."""
_HAND_ON = frozenset(
    ("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject", "rejectattr",
     "reverse", "select", "selectattr")
)  # fmt: skip
"""Filters that neither write nor compare what they are given."""
_COMPARING = frozenset(
    ("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower", "lt",
     "ne", "upper")
)  # fmt: skip
"""Tests that do."""


def _measured(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter or test that is checked before it runs; what Jinja itself gives it comes first."""
    own = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def run(*values: Any, **named: Any) -> Any:
        if type(values[own]) not in _LIGHT and isinstance(values[own], Iterator):
            values = (*values[:own], list(values[own]), *values[own + 1 :])
        check(*values[own:], **named)
        return function(*values, **named)

    return run


def _measured_method(owner: Any, name: Any, method: Any) -> Any:
    if not isinstance(owner, str | bytes | int) or not callable(method):
        return method
    if name == "join" and isinstance(owner, str):
        return functools.partial(_joined, owner)
    check = _CHECKS.get(name)
    if check is None:
        return method

    def run(*values: Any, **named: Any) -> Any:
        check(owner, *values, **named)
        return method(*values, **named)

    return run


def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: Any = None) -> str:
    from jinja2.filters import make_attrgetter

    return _joined(
        str(d), value if attribute is None else map(make_attrgetter(environment, attribute), value)
    )


def _joined(separator: str, values: Any) -> str:
    texts, size = [], 0
    for value in values:
        texts.append(str(_weighed(value)))
        size += len(texts[-1]) + len(separator)
        _check_size(size)
    return separator.join(texts)


def _raise_exception(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter escapes it for HTML."""
    weight = _weight(value)
    wide = indent if isinstance(indent, int) else len(indent or "")
    between = sum(map(len, separators or ()))
    _check_size(weight.characters + weight.values * (wide * weight.depth + between))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
