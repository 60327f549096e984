"""Structured outputs: a JSON schema, a regular expression, a choice of texts, a grammar.

Each becomes an llguidance grammar (https://github.com/guidance-ai/llguidance). The front end checks
it; the core follows it token by token (`grammar`)."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from toolkit.errors import InvalidParamError
from toolkit.sampling.json_schema import (
    check_cost,
    check_count,
    limit_numbers,
    prepare,
)
from toolkit.sampling.structural_tags import StructuralTag

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

T = TypeVar("T")

MAX_SIZE = 256 * 1024  # characters of a constraint
MAX_ITEMS = 20_000  # alternatives at one place of an answer
STACK_BYTES = 64 * 1024 * 1024  # stack of the compiling threads, enough for MAX_RULES
MAX_LEXER_STATES = 32_768  # per request; 1 to 2 kB each
WHITESPACE = r"\x20|\r?\n[\x20\t]{0,16}"
"""Between the parts of JSON: a space, or a line break and the next line's indentation. Bounded,
because confused models write line breaks without end."""
THINK_START, THINK_END = "<think>", "</think>"  # mark the reasoning in an answer
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Constraint on an answer: exactly one of the first six fields. The names are vLLM's.

    Raises InvalidRequestError for none or several, and for values of the wrong kind."""

    json: dict[str, Any] | str | None = None  # JSON schema, or its text
    json_object: bool = False  # any JSON object
    regex: str | None = None
    """Regular expression that the complete answer matches (Rust syntax, no look-around)."""
    choice: list[str] | None = None
    grammar: str | None = None  # Lark with llguidance's extensions, or GBNF
    structural_tag: dict[str, Any] | str | None = None  # see `structural_tags`; or its JSON
    lenient: bool = False
    """Ignore what cannot be enforced in a JSON schema, instead of refusing it, and let objects have
    properties that the schema does not name unless it forbids them."""
    reasoning: Literal["begun", "possible"] | None = None
    """The answer may begin with unconstrained reasoning. begun: the prompt has started it.
    possible: the answer may start it with the first of `reasoning_marks`."""
    reasoning_marks: tuple[str, str] = (THINK_START, THINK_END)
    """Texts around the reasoning. The first must be one token."""
    delimiters: list[str] = []
    """Special tokens that the answer may contain as text, next to those of the built-in formats."""
    param: str = "structured_outputs"  # name of the field in the request, for error messages

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise self._refused(
                f"takes one of {', '.join(_KINDS)}; got {', '.join(given) or 'none'}"
            )
        if self.choice is not None and not (
            self.choice and all(isinstance(one, str) and one for one in self.choice)
        ):
            raise self._refused("has an empty choice, or one with something other than texts")

    def to_grammar(self) -> str:
        """Return the constraint as an llguidance grammar, checked. Takes up to a second; cached.

        Raises InvalidRequestError, with the cause, if it cannot be enforced or is too large."""
        try:
            if self.choice is not None:
                return _checked("choice", json.dumps(self.choice), False)
            if self.regex is not None:
                return _checked("regex", self.regex, False)
            if self.grammar is not None:
                return _checked("grammar", self.grammar, False)
            if self.structural_tag is not None:
                tag = self.structural_tag
                text = tag if isinstance(tag, str) else json.dumps(tag)
                return _checked("structural_tag", text, self.lenient)
            schema: Any = {"type": "object"} if self.json_object else self.json
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return _checked("json", text, self.lenient)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._refused(str(error) or type(error).__name__) from None

    def _refused(self, why: str) -> InvalidParamError:
        return InvalidParamError(self.param, f"{why}.")


_OPTIONS = '%llguidance {"no_forcing": true}'


def limits() -> LLParserLimits:
    """Return limits that keep a compilation under two seconds and a step under about 50 ms."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=MAX_ITEMS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )


def reason_of(matcher: LLMatcher) -> str:
    """Return why a matcher failed."""
    lines = matcher.get_error().strip().splitlines() or ["unknown cause"]
    if lines[0].startswith("NoExtensionBias"):
        return "it allows no text at all"
    return f"it is too complex ({lines[0]})"


def prepared(schema: Any, *, lenient: bool) -> Any:
    """Return a JSON schema as the grammar enforces it, with llguidance's options.

    Raises ValueError for what it cannot enforce."""
    schema = prepare({} if schema is True else schema, lenient=lenient)
    if not isinstance(schema, dict):
        return schema  # to be refused
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient, "coerce_one_of": lenient}
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}}


def choice_rule(choices: Sequence[str]) -> str:
    """Return the right side of a Lark rule, and a terminal that it needs.

    One terminal costs less than as many alternatives of a rule."""
    return "CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)


def regex_rule(regex: str) -> str:
    """Return the right side of a Lark rule, and a terminal that it needs."""
    return f"REGEX\nREGEX: {_regex_literal(regex)}"


def _regex_literal(regex: str) -> str:
    escaped = re.sub(r"(?s)\\(.)|/|\n", _escaped, regex)
    return f"/(?:{escaped})/"


def _escaped(found: re.Match[str]) -> str:
    if found[1] is not None:
        return found[0]
    return "\\n" if found[0] == "\n" else "\\/"


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run work on grammars in a thread with a large stack."""
    with _starting:  # submitting starts a thread, with the stack size set at that moment
        before = threading.stack_size(STACK_BYTES)
        try:
            return _threads().submit(work)
        finally:
            threading.stack_size(before)


_starting = threading.Lock()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="grammar")


@functools.lru_cache(maxsize=64)
def _checked(kind: str, text: str, lenient: bool) -> str:
    check_count(len(text), MAX_SIZE, "characters")
    return in_thread(lambda: _convert(kind, text, lenient)).result()


def _convert(kind: str, text: str, lenient: bool) -> str:
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    if kind == "structural_tag":
        kind, text = "grammar", _structural_tag(text, lenient=lenient)
    with _reading():
        rules, schemas = _parts(kind, text)
    check_cost(rules, schemas)
    for schema in schemas:
        limit_numbers(schema)
    if kind == "json":
        schemas = [prepared(schemas[0], lenient=lenient)]
    with _reading():
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schemas[0]))
        elif kind == "choice":
            grammar = LLMatcher.grammar_from_lark(f"start: {choice_rule(json.loads(text))}")
        else:
            written = _with_schemas(text, schemas)
            grammar = grammar_from(kind, written)  # type: ignore[arg-type]  # one of its names
    if kind == "grammar":  # which may have been GBNF
        check_cost(*_parts(kind, grammar))
    grammar = _without_forcing(grammar)
    failure, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits())
    if failure:
        raise ValueError(f"cannot be enforced: {_explain(messages[0], kind)}")
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits())
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"cannot be enforced: {reason_of(matcher)}")
    return grammar


def _structural_tag(text: str, *, lenient: bool) -> str:
    """Return a structural tag as a Lark grammar. Raises ValueError."""

    def write_schema(schema: Any) -> str:
        return f"%json {json.dumps(prepared(schema, lenient=lenient), ensure_ascii=False)}"

    try:
        return StructuralTag(text, write_schema, _regex_literal).lark
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"is not a structural tag: {error or type(error).__name__}") from None


_SCHEMA = "failed to compile JSON schema: "
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r"(?s)\n *\d+ \| .*$")  # of the grammar, which may be ours
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def _explain(message: str, kind: str) -> str:
    """Return llguidance's message without the parts of the grammar that are not the request's."""
    text = _EXCERPT.sub("", message.strip())
    place = None if _SCHEMA in text else _PLACE.match(text)
    text = _PLACE.sub("", text).replace(_SCHEMA, "")
    if (found := _UNSUPPORTED.search(text)) is not None:
        text = f"the keywords {found[1]} are not supported"
    if "regex parse error" in text:
        text = f"a regular expression is not valid: {text.rpartition('error: ')[2]}"
    if kind == "grammar" and place is not None:  # the first line is ours
        text = f"line {int(place[1]) - 1}, column {place[2]}: {text}"
    return text[:500]


def _without_forcing(grammar: str) -> str:
    """Let the model choose among the tokens that spell a text, also if the text is the only one.

    llguidance would force one of them, and does not know which one the model expects."""
    if not grammar.startswith("{"):
        return f"{_OPTIONS}\n{grammar}"
    (only,) = json.loads(grammar)["grammars"]
    if only.get("lark_grammar") is not None:
        return f"{_OPTIONS}\n{only['lark_grammar']}"
    return f"{_OPTIONS}\nstart: %json {json.dumps(only['json_schema'])}\n"


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot be read: {str(error) or type(error).__name__}") from None


def _parts(kind: str, text: str) -> tuple[str, list[Any]]:
    """Return a constraint's rules or regular expression, without its JSON schemas, and those."""
    if kind == "json":
        return "", [json.loads(text)]
    if kind == "choice":
        return "", []
    if kind == "regex":
        return text, []
    rules, schemas, end = "", [], 0
    for schema, start, after in _schemas(text):
        schemas.append(schema)
        rules, end = rules + text[end:start], after
    return rules + text[end:], schemas


def _with_schemas(text: str, schemas: Sequence[Any]) -> str:
    """Return a grammar with other JSON schemas."""
    pieces, end = [], 0
    for schema, (_, start, after) in zip(schemas, _schemas(text), strict=False):
        pieces += [text[end:start], json.dumps(schema)]
        end = after
    return "".join([*pieces, text[end:]])


def _schemas(text: str) -> Iterator[tuple[Any, int, int]]:
    """Yield the JSON schemas in a grammar, with their first and last position."""
    decoder, end = json.JSONDecoder(), 0
    for found in re.finditer(r"%json\s*", text):
        if found.start() >= end:
            with contextlib.suppress(ValueError):  # part of a text or a comment
                schema, end = decoder.raw_decode(text, found.end())
                yield schema, found.end(), end
