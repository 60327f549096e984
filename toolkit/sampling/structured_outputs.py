"""Structured outputs: a JSON schema, a regular expression, a choice of texts, a grammar.

Each becomes an llguidance grammar (https://github.com/guidance-ai/llguidance). The front end checks
it; the core follows it token by token (`grammar`)."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from toolkit.errors import InvalidParamError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

T = TypeVar("T")

MAX_SIZE = 64 * 1024
"""Characters of a grammar. Together with llguidance's limits this bounds the time of a compilation:
the worst that we found takes a second, a usual one a millisecond."""
MAX_RULES = 1000  # rules or references of a grammar: llguidance recurses over them
STACK_BYTES = 64 * 1024 * 1024  # stack of the compiling threads, enough for MAX_RULES
MAX_LEXER_STATES = 32_768  # per request; 1 to 2 kB each
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of JSON. Bounded, because confused models write line breaks without end."""
_NOTHING_FITS = "NoExtensionBias"  # start of llguidance's error if a grammar allows no text at all
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Constraint on an answer: exactly one of the first five fields. The names are vLLM's.

    Raises InvalidRequestError for none or several, and for values of the wrong kind."""

    json: dict[str, Any] | str | None = None  # JSON schema, or its text
    json_object: bool = False  # any JSON object
    regex: str | None = None
    """Regular expression that the complete answer matches (Rust syntax, no look-around)."""
    choice: list[str] | None = None
    grammar: str | None = None  # Lark with llguidance's extensions, or GBNF
    lenient: bool = False  # ignore what cannot be enforced in a JSON schema, instead of refusing it
    reasoning: Literal["begun", "possible"] | None = None
    """The answer may begin with unconstrained reasoning, up to `</think>`. begun: the prompt has
    started it. possible: the answer may start it with `<think>`."""
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
            schema: Any = {"type": "object"} if self.json_object else self.json
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return _checked("json", text, self.lenient)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._refused(str(error) or type(error).__name__) from None

    def _refused(self, why: str) -> InvalidParamError:
        return InvalidParamError(self.param, f"{why}.")


def limits() -> LLParserLimits:
    """Return limits that keep a compilation under a second and a step under about 50 ms."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


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


@functools.lru_cache(maxsize=256)
def _checked(kind: str, text: str, lenient: bool) -> str:
    if len(text) > MAX_SIZE:
        raise ValueError(f"has {len(text)} characters; at most {MAX_SIZE} are allowed")
    return in_thread(lambda: _convert(kind, text, lenient)).result()


def _convert(kind: str, text: str, lenient: bool) -> str:
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    try:
        if kind == "json":
            schema = json.dumps(json.loads(text))  # one spelling of every key
            options: Any = {
                "whitespace_pattern": _WHITESPACE,
                "lenient": lenient,
                "coerce_one_of": lenient,
            }
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)
        else:
            grammar = grammar_from(kind, text)  # type: ignore[arg-type]  # one of its names
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot be read: {str(error) or type(error).__name__}") from None
    _check_rules(kind, grammar)
    failure, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits())
    if failure:
        raise ValueError(f"cannot be enforced: {messages[0].strip()[:2000]}")
    matcher = LLMatcher(LLTokenizer("byte"), grammar, limits=limits())
    matcher.compute_bitmask()
    if matcher.is_error() and matcher.get_error().startswith(_NOTHING_FITS):
        raise ValueError("cannot be enforced: it allows no text at all")
    return grammar


def _check_rules(kind: str, grammar: str) -> None:
    count = grammar.count('"$ref"')
    if kind == "grammar":  # a rule takes a line; schemas in it may escape their references
        count += grammar.count("\n") + grammar.count("\\u")
    if count > MAX_RULES:
        raise ValueError(f"has {count} rules or references; at most {MAX_RULES} are allowed")
