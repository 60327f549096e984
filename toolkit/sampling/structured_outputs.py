"""What an answer may be: a JSON schema, a regular expression, one of some texts, a grammar.

Each becomes a grammar of llguidance (https://github.com/guidance-ai/llguidance), which is checked where a request is
taken in and followed, token by token, where it runs (`grammar`).
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from toolkit.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

T = TypeVar("T")

MAX_SIZE = 64 * 1024
"""Characters of a grammar. With llguidance's own limits of work this bounds the time of a compilation: the worst of this
size that we found takes a second, the usual one a millisecond."""
MAX_RULES = 1000
"""Rules or references of a grammar: llguidance goes from one to the next on the stack."""
STACK_BYTES = 64 * 1024 * 1024
"""Of the threads that compile, for that many of them."""
MAX_LEXER_STATES = 32_768
"""One to two kB each, of one request."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of JSON. Bounded, since models that are lost write line breaks without end."""
_NOTHING_FITS = "NoExtensionBias"
"""What llguidance's error begins with where no byte may come first, and the end may not either."""
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What an answer may be; one of the first five. The names are vLLM's.

    Raises InvalidRequestError for none of them or several, and for values of the wrong kind.
    """

    json: dict[str, Any] | str | None = None
    """A JSON schema, or its text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole answer matches (Rust's syntax, no look-around)."""
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark as llguidance extends it, or GBNF."""
    lenient: bool = False
    """Passes over what a JSON schema asks for and cannot be held, where it would be refused."""
    reasoning: Literal["begun", "possible"] | None = None
    """The answer may begin with reasoning, which is free: a part up to `</think>`, which the prompt has begun, or
    which the answer begins with `<think>`."""
    param: str = "structured_outputs"
    """What a request calls it, for messages of errors."""

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise self._refused(
                f"takes one of {', '.join(_KINDS)}; it got {', '.join(given) or 'none'}"
            )
        if self.choice is not None and not (
            self.choice and all(isinstance(one, str) and one for one in self.choice)
        ):
            raise self._refused("has a choice without texts to choose from")

    def to_grammar(self) -> str:
        """The same as a grammar of llguidance, checked. Takes up to a second; remembers the last ones.

        Raises InvalidRequestError, with the cause, for what cannot be held or is too large.
        """
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

    def _refused(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self.param} {why}.", param=self.param)


def limits() -> LLParserLimits:
    """Of the work and memory that a grammar may take: a compilation stays under a second, a step under some 50 ms."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Runs work on grammars on a thread whose stack has room for them."""
    with _starting:  # threads start when work is submitted, with the stack that is set then
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
        raise ValueError(f"has {len(text)} characters, and {MAX_SIZE} are the most")
    return in_thread(lambda: _convert(kind, text, lenient)).result()


def _convert(kind: str, text: str, lenient: bool) -> str:
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    try:
        if kind == "json":
            schema = json.dumps(json.loads(text))  # one spelling of every key
            options = {
                "whitespace_pattern": _WHITESPACE,
                "lenient": lenient,
                "coerce_one_of": lenient,
            }
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]  # a plain dict
        else:
            grammar = grammar_from(kind, text)  # type: ignore[arg-type]  # one of its names
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot be read: {str(error) or type(error).__name__}") from None
    _check_rules(kind, grammar)
    failure, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits())
    if failure:
        raise ValueError(f"cannot be held: {messages[0].strip()[:2000]}")
    matcher = LLMatcher(LLTokenizer("byte"), grammar, limits=limits())
    matcher.compute_bitmask()
    if matcher.is_error() and matcher.get_error().startswith(_NOTHING_FITS):
        raise ValueError("cannot be held: there is no text that it allows")
    return grammar


def _check_rules(kind: str, grammar: str) -> None:
    count = grammar.count('"$ref"')
    if (
        kind == "grammar"
    ):  # a rule takes a line; a schema within one may spell its references with escapes
        count += grammar.count("\n") + grammar.count("\\u")
    if count > MAX_RULES:
        raise ValueError(f"has {count} rules or references, and {MAX_RULES} are the most")
