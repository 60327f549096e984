"""Environment of chat templates: Jinja's sandbox, which runs no Python of the template.

A model's template is chosen by the user, so its messages are all that a stranger brings. They can
make it slow only by many rounds of a loop or calls of a macro: both check a time limit, and the
size of the result has one too. A template that a request brings can do more, so it is rendered in a
process with its own limits (`template_pool`)."""

from __future__ import annotations

import functools
import json
import math
import time
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import jinja2

MAX_SECONDS = 5.0  # A conversation of a million tokens takes a fraction of a second
MAX_CHARACTERS = 32 * 1024 * 1024

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


def run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Raises jinja2's SecurityError beyond a limit, and any error of the template."""
    from jinja2.exceptions import SecurityError

    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise SecurityError(f"it makes more than {MAX_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _deadline.reset(token)


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        from jinja2.exceptions import SecurityError

        raise SecurityError(f"it takes longer than {MAX_SECONDS:g} seconds")


def compile_template(source: str) -> jinja2.Template:
    """Compile a template with checks of its time. Raises jinja2.TemplateSyntaxError."""
    from jinja2 import Template, TemplateSyntaxError

    environment = _environment()
    try:
        tree = _limiter()(environment).visit(environment.parse(source))
        code = environment.compile(tree)
    except (SyntaxError, RecursionError) as error:  # limits of Python, whose code it becomes
        raise TemplateSyntaxError(f"it is nested too deeply: {error.args[0]}", 1) from None
    return Template.from_code(environment, code, environment.make_globals(None))


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the environment that Transformers documents for chat templates."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import pass_context

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training. Here it is only a scope."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration is not a ClassVar

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        check_time = staticmethod(_check_time)

    @pass_context
    def finalize(context: object, value: object) -> object:
        return value

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        # Constants are not computed while compiling (nor is output, as `finalize` needs a context):
        # a compiled template, which is kept, is then as small as its source.
        optimized=False,
        finalize=finalize,
    )
    environment.filters["tojson"] = _tojson
    environment.tests["none"] = _is_none
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


@functools.cache
def _limiter() -> Callable[[jinja2.Environment], Any]:
    """Return the transformer that adds the checks of time to a template."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Limiter(NodeTransformer):
        def __init__(self, environment: jinja2.Environment) -> None:
            self._environment = environment

        def visit_For(self, node: nodes.For) -> Any:  # noqa: N802 - visitors are found by this name
            self.generic_visit(node)
            function = nodes.EnvironmentAttribute("check_time", lineno=node.lineno)
            call = nodes.Call(function, [], [], None, None, lineno=node.lineno)
            check = nodes.ExprStmt(call, lineno=node.lineno)
            node.body.insert(0, check.set_environment(self._environment))
            return node

        visit_Macro = visit_CallBlock = visit_For  # noqa: N815

    return Limiter


def _is_none(value: Any) -> bool:
    """Return True for none, and for a message's content that is missing.

    Null fields are dropped, as in Transformers, since templates print them or fail. But those of
    DeepSeek render calls only where the content is none."""
    from jinja2 import Undefined

    if not isinstance(value, Undefined):
        return value is None
    message = value._undefined_obj
    return value._undefined_name == "content" and isinstance(message, dict) and "role" in message


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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
