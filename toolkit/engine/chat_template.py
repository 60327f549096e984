"""A conversation as text, by the Jinja template that comes with a model, as Transformers renders it.

Templates come with checkpoints and are not trusted: they run in Jinja's sandbox, for at most SECONDS, and make at
most CHARACTERS. The time is looked at in every turn of a loop and every call of a macro, and what grows by joining,
repeating, replacing, padding or formatting is measured before it is made, so that the bound holds in the thread that
renders, and nothing is left running. How long a list of long texts is when it is written as text or JSON is not
measured.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import ConfigError

if TYPE_CHECKING:
    import jinja2

SECONDS = 5.0
"""A conversation of a million tokens takes a fraction of a second."""
CHARACTERS = 32 * 1024 * 1024
"""The longest text, and the most items of a list."""
_BITS = 4096
"""The largest power, in bits."""

_TAG = "THE_TEXT_TO_GO_ON_WITH_ENDS_HERE "
"""Letters, which no filter escapes, and a space, which tells a template that strips messages from one that does not."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; templates read the first, and those of gpt-oss the second."""

Message = dict[str, Any]


class ChatTemplates:
    """A model's templates by name, and the special tokens that they may write."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._templates = templates
        self._special_tokens = special_tokens
        self._compiled = functools.lru_cache(maxsize=8)(_compile)

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def text(self) -> str:
        """All of them."""
        return "\n".join(self._templates.values())

    @property
    def source(self) -> str | None:
        """The usual template; None when there is none."""
        return self._templates.get("default")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation.

        tools: JSON schemas, or functions, whose signature and docstring become one. chat_template: a name or a template,
        instead of the model's ("tool_use" when there are tools and such a template, else "default").
        continue_final_message: leaves the last message open, for the model to go on with; a text names the
        message's field instead of "content". `variables` are the template's own, such as enable_thinking.

        Raises ValueError or TypeError for what cannot be rendered, and what the template raises: jinja2.TemplateError,
        and anything that its expressions do to values of the wrong kind.
        """
        template = self._choose(chat_template, tools)
        if not messages:
            raise ValueError("the conversation is empty")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        conversation = [_message(message) for message in messages]
        final = None
        if continue_final_message:
            field = continue_final_message if isinstance(continue_final_message, str) else "content"
            final = _mark_end(conversation, field, template)
        text = _run(
            self._compiled(template),
            {
                **self._special_tokens,
                **variables,
                "messages": conversation,
                "tools": None if tools is None else [_schema(tool) for tool in tools],
                "documents": None if documents is None else [_document(one) for one in documents],
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return text if final is None else _cut_at_mark(text, final)

    def _choose(self, asked: str | None, tools: Sequence[Any] | None) -> str:
        if asked is not None:
            return self._templates.get(asked, asked)
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise ValueError(
                f"none of its templates ({', '.join(sorted(self._templates))}) is the default; chat_template names one"
            )
        return self._templates["default"]


def read_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """A folder's templates by name: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, or what
    tokenizer_config.json has.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files.setdefault("default", folder / "chat_template.jinja")
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return named_templates(tokenizer_config.get("chat_template"))


def named_templates(found: Any) -> dict[str, str]:
    """Templates by name, of the forms that tokenizer_config.json has: a template, or a list of them with names."""
    if not found:
        return {}
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}
    templates = found if isinstance(found, dict) else {"default": found}
    if not all(isinstance(template, str) for template in templates.values()):
        raise TypeError("a chat template is a text")
    return templates


def given_template(given: str) -> str:
    """The template that `--chat-template` names or is: what has a brace in it is no file's name. Raises ConfigError when
    it cannot be read or is no template.
    """
    from jinja2 import TemplateSyntaxError

    source = given
    if "{" not in given:
        try:
            source = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--chat-template is a file or a template, and {given!r} cannot be read: {error}",
                param="chat_template",
            ) from None
    try:
        _compile(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"The template that --chat-template gives has a mistake in line {error.lineno}: {error.message}",
            param="chat_template",
        ) from None
    return source


# ---- what a template is given


def _message(message: Message) -> Message:
    """Without keys that are null, which templates would print; reasoning under every name."""
    if not isinstance(message, dict):
        raise TypeError(f"a message is a dict, not {message!r}")
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _schema(tool: Any) -> Any:
    if isinstance(tool, dict):
        return tool
    if not callable(tool):
        raise TypeError("a tool is a JSON schema or a function")
    from transformers.utils import get_json_schema

    return get_json_schema(tool)


def _document(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise TypeError("a document is a dict with a title and a text")
    return document


def _mark_end(conversation: list[Message], field: str, template: str) -> str:
    """Puts a mark at the end of the last message's text, and returns that text."""
    last = conversation[-1]
    if field not in last:
        raise ValueError(f"the last message has no {field!r} to continue")
    names = [name for name in _REASONING if name in last] if field in _REASONING else [field]
    if not any(name in template for name in names):
        raise ValueError(f"the template reads no {field!r} that could be continued")
    value = last[field]
    if not isinstance(value, list | tuple):
        last.update({name: value + _TAG for name in names if last[name] == value})
        return str(value)
    parts = list(value)
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            text = parts[index]["text"]
            parts[index] = {**parts[index], "text": text + _TAG}
            last[field] = parts
            return str(text)
    raise ValueError("the last message has no text to continue")


def _cut_at_mark(rendered: str, final: str) -> str:
    mark = _TAG.strip()
    if mark not in rendered or final.strip() not in rendered:
        raise ValueError("the template leaves out a part of the last message, so that it cannot be continued")
    at = rendered.rindex(mark)
    text = rendered[:at] if rendered.startswith(_TAG, at) else rendered[:at].rstrip()
    return text.replace(_TAG, "").replace(mark, "")  # of a template that writes the message twice


# ---- running it

_deadline: ContextVar[float] = ContextVar("deadline")


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
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


def _compile(source: str) -> jinja2.Template:
    """The template with its limits built in. Raises jinja2.TemplateSyntaxError."""
    from jinja2 import Template

    environment = _environment()
    tree = _bound()(environment).visit(environment.parse(source))
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


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
            return _measured_method(obj, argument, super().getitem(obj, argument))

        check_time = staticmethod(_check_time)

        @staticmethod
        def concatenate(*values: Any) -> str:
            texts = [str(value) for value in values]
            _check_size(sum(map(len, texts)))
            return "".join(texts)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    for name, check in _CHECKS.items():
        if name in environment.filters:
            environment.filters[name] = _measured(environment.filters[name], check)
    environment.filters["join"] = pass_environment(_join)
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    del environment.globals["lipsum"]  # makes as much text as it is asked for
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
            _check_format(left)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _BITS:
            raise _too_much("it makes a number that is too large")
    else:
        for many, count in ((left, right), (right, left)):
            if isinstance(many, kinds) and isinstance(count, int):
                _check_size(len(many) * count)


def _check_width(value: Any, width: int = 0, *_: Any) -> None:
    _check_size(width)


def _check_replaced(text: Any, old: Any, new: Any, count: Any = None) -> None:
    text = str(text)
    _check_size(len(text) + text.count(str(old)) * len(str(new)))


def _check_tabs(text: str, tabsize: int = 8) -> None:
    _check_size(len(text) + text.count("\t") * tabsize)


def _check_indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    text = str(s)
    _check_size(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))


def _check_wrapped(
    s: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: Any
) -> None:
    _check_size(len(str(s)) * (1 + len(wrapstring or "")))


def _check_start(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise _too_much("sum adds numbers only")


def _check_precision(value: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > 100:
        raise _too_much("it makes a number that is too large")


def _check_format(text: Any, *values: Any, **named: Any) -> None:
    """A width can also come from an argument: `%*d`, or `{:{}}`."""
    if _WIDE.search(str(text)):
        raise _too_much("it formats to a width of its own making")


_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})|\{[^{}]*:[^{}]*(?:\{|\d{5})")
_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "batch", "slice", "to_bytes"), _check_width),
    **dict.fromkeys(("format", "format_map"), _check_format),
    "expandtabs": _check_tabs,
    "indent": _check_indent,
    "replace": _check_replaced,
    "round": _check_precision,
    "sum": _check_start,
    "wordwrap": _check_wrapped,
}
"""Of filters, and of methods of texts and numbers: what measures their arguments, the first of which is the text."""


def _measured(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter that is checked before it runs; what Jinja itself gives it comes first."""
    own = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def run(*values: Any, **named: Any) -> Any:
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
        texts.append(str(value))
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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
