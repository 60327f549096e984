"""How models write calls of tools: the formats, the grammars that hold a model to one, and what reads it.

A parser reads an answer as it comes, and gives the same in whatever pieces it comes. What is no call is content. A call
is told of from where its name is known and its arguments begin; an answer that is cut there ends within it.
"""

from __future__ import annotations

import abc
import json
import secrets
import string
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

MAX_PARALLEL = 32
"""Calls in an answer that is held to calls."""
_ALPHABET = string.ascii_letters + string.digits
_NAME = frozenset(_ALPHABET + "_.-")


class Function(Protocol):
    """A function that the model may call."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any] | None:
        """JSON schema of the arguments."""
        ...

    @property
    def strict(self) -> bool | None: ...


class Tool(Protocol):
    """A tool of a request."""

    @property
    def function(self) -> Function: ...


@dataclass(slots=True)
class Piece:
    """A part of an answer: of its content, or of the arguments of call `index`, whose first piece has its name."""

    text: str
    index: int | None = None
    name: str | None = None


class _EndError(Exception):
    """The answer has ended."""


class _NoCallError(Exception):
    """What looked like a call is none."""


Steps = Generator[None, None, None]
"""Reads on whenever it is resumed, and stops where text is missing."""


class ToolFormat(abc.ABC):
    """Reads one answer of a model, in one format."""

    marks: ClassVar[tuple[str, ...]] = ()
    """What marks calls in an answer: often tokens of their own, and special ones."""

    def __init__(self, known: Sequence[str], *, parallel: bool = True) -> None:
        """`known`: names of the tools; `parallel`: whether there is more than a first call."""
        self.num_calls = 0
        self.within_arguments = False
        """Whether the text so far ends within the arguments of a call."""
        self._known = frozenset(known)
        self._parallel = parallel
        self._text = ""
        self._at = 0
        self._kept: int | None = None
        """Where the text begins that is content, should it turn out not to be a call."""
        self._ended = False
        self._pieces: list[Piece] = []
        self._steps = self._run()

    def add(self, text: str) -> list[Piece]:
        """What more text makes certain."""
        begin = self._at if self._kept is None else self._kept
        self._text = self._text[begin:] + text
        self._at -= begin
        self._kept = None if self._kept is None else 0
        return self._resume()

    def end(self) -> list[Piece]:
        """The same when no more text comes."""
        self._ended = True
        return self._resume()

    @staticmethod
    def new_id() -> str:
        """A name for a call."""
        return f"call_{secrets.token_hex(12)}"

    @classmethod
    @abc.abstractmethod
    def grammar(cls, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Lark rules, with `calls` for an answer that is one call of these tools or, if `parallel`, several."""

    @abc.abstractmethod
    def _read(self) -> Steps:
        """Reads the answer to its end, or to where nothing more counts."""

    def _run(self) -> Steps:
        try:
            yield from self._read()
        except _EndError:
            if self._kept is not None:
                self._tell(self._text[self._kept :])

    def _resume(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _tell(self, text: str, index: int | None = None, name: str | None = None) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.index == index:
            last.text += text
        elif text or name is not None:
            self._pieces.append(Piece(text, index, name))

    # ---- reading

    def _peek(self) -> Generator[None, None, str]:
        """The next character. Raises _EndError when there is none."""
        while self._at == len(self._text):
            if self._ended:
                raise _EndError
            yield
        return self._text[self._at]

    def _skip_space(self) -> Steps:
        while (yield from self._peek()).isspace():
            self._at += 1

    def _skip(self, mark: str) -> Generator[None, None, bool]:
        """Passes over a mark; False when it is not there."""
        while len(self._text) - self._at < len(mark) and mark.startswith(self._text[self._at :]):
            if self._ended:
                return False
            yield
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _content_until(self, mark: str) -> Steps:
        """Tells content up to a mark, and passes over the mark. Space before it is not told."""
        while True:
            found = self._text.find(mark, self._at)
            if found >= 0:
                content = self._text[self._at : found].rstrip()
                self._tell(content)
                self._kept = self._at + len(content)
                self._at = found + len(mark)
                return
            certain = len(self._text) - overlap(self._text[self._at :], mark)
            certain = self._at + len(self._text[self._at : certain].rstrip())
            self._tell(self._text[self._at : certain])
            self._at = certain
            if self._ended:
                rest = self._text[certain:]
                self._tell("" if self.num_calls and rest.isspace() else rest)
                raise _EndError
            yield

    def _call(self) -> Generator[None, None, bool]:
        """Reads {"name": ..., "arguments": ...}. False where there is none; that is told as content."""
        if self._kept is None:
            self._kept = self._at
        try:
            yield from self._members()
        except _NoCallError:
            if self._kept is not None:
                self._tell(self._text[self._kept : self._at])
                self._kept = None
                return False
        return True

    def _members(self) -> Steps:
        name, index = None, None
        held: list[str] = []
        if not (yield from self._skip("{")):
            raise _NoCallError
        while True:
            yield from self._skip_space()
            if (yield from self._skip("}")):
                break
            if (yield from self._skip(",")):
                continue
            key = yield from self._string()
            yield from self._skip_space()
            if not (yield from self._skip(":")):
                raise _NoCallError
            yield from self._skip_space()
            if key == "name" and name is None:
                name = yield from self._string()
                self._check_name(name)
            elif key in ("arguments", "parameters") and name is not None and index is None:
                index = self._begin(name)
                yield from self._arguments(index)
            elif key in ("arguments", "parameters") and index is None:
                held.clear()
                yield from self._value(held.append)
            else:
                yield from self._value(lambda character: None)
        if name is None:
            raise _NoCallError
        if index is None:
            self._tell("".join(held) or "{}", self._begin(name))

    def _begin(self, name: str) -> int:
        """Tells that there is a call of this name; its number."""
        index = self.num_calls
        self.num_calls += 1
        self._kept = None
        self._tell("", index, name)
        return index

    def _arguments(self, index: int) -> Steps:
        """Reads the arguments of a call, which are told as they come."""
        self.within_arguments = True
        yield from self._value(lambda character: self._tell(character, index))
        self.within_arguments = False

    def _check_name(self, name: str) -> None:  # noqa: B027  # most formats take any name
        """Raises _NoCallError for a name that no call has."""

    def _string(self) -> Generator[None, None, str]:
        characters: list[str] = []
        yield from self._value(characters.append)
        try:
            value = json.loads("".join(characters), strict=False)
        except (ValueError, RecursionError):
            raise _NoCallError from None
        if not isinstance(value, str):
            raise _NoCallError
        return value

    def _value(self, tell: Callable[[str], None]) -> Steps:
        """Reads one JSON value, character by character; what is within it is not checked."""
        depth, in_string, escaped, empty = 0, False, False, True
        while True:
            character = yield from self._peek()
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif depth == 0 and (character in ",:}]" or character.isspace()):
                if empty:
                    raise _NoCallError
                return
            elif character in "}]":
                depth -= 1
            self._at += 1
            tell(character)
            empty = False
            if depth == 0 and not in_string and character in '"}]':
                return


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` for each call: Hermes, Qwen 2.5 and 3."""

    marks = ("<tool_call>", "</tool_call>")

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, parallel: bool) -> str:
        more = f' ("\\n" call){{0,{MAX_PARALLEL - 1}}}' if parallel else ""
        rules = f'calls: call{more}\ncall: "<tool_call>\\n" object "\\n</tool_call>"'
        return f"{rules}\n{_objects(tools, 'arguments')}"

    def _read(self) -> Steps:
        while self._parallel or not self.num_calls:
            yield from self._content_until("<tool_call>")
            yield from self._skip_space()
            if (yield from self._call()):
                yield from self._skip_space()
                yield from self._skip("</tool_call>")


class Llama3(ToolFormat):
    """The whole answer is `{"name": ..., "parameters": {...}}`, or several with semicolons between: Llama 3.1 to 3.3."""

    marks = ("<|python_tag|>",)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, parallel: bool) -> str:
        more = f' ("; " object){{0,{MAX_PARALLEL - 1}}}' if parallel else ""
        return f"calls: object{more}\n{_objects(tools, 'parameters')}"

    def _read(self) -> Steps:
        self._kept = 0
        yield from self._skip_space()
        yield from self._skip("<|python_tag|>")
        yield from self._skip_space()
        while self._parallel or not self.num_calls:
            if (yield from self._peek()) != "{" or not (yield from self._call()):
                yield from self._content()
            yield from self._skip_space()
            yield from self._skip(";")
            yield from self._skip_space()

    def _content(self) -> Steps:
        """The rest of the answer."""
        self._at = self._at if self._kept is None else self._kept
        self._kept = None
        while True:
            yield from self._peek()
            self._tell(self._text[self._at :])
            self._at = len(self._text)

    def _check_name(self, name: str) -> None:
        if name not in self._known:  # the answer may well be JSON that is no call
            raise _NoCallError


class Mistral(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME{...}` for each call."""

    marks = ("[TOOL_CALLS]", "[ARGS]")

    @staticmethod
    def new_id() -> str:
        """Mistral's templates take nine letters and digits, and nothing else."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, parallel: bool) -> str:
        more = f' (", " object){{0,{MAX_PARALLEL - 1}}}' if parallel else ""
        return f'calls: "[TOOL_CALLS][" object{more} "]"\n{_objects(tools, "arguments")}'

    def _read(self) -> Steps:
        while self._parallel or not self.num_calls:
            yield from self._content_until("[TOOL_CALLS]")
            yield from self._skip_space()
            if (yield from self._skip("[")):
                yield from self._list()
            else:
                yield from self._named()

    def _list(self) -> Steps:
        while self._parallel or not self.num_calls:
            yield from self._skip_space()
            if (yield from self._skip("]")) or not (yield from self._call()):
                return
            yield from self._skip_space()
            yield from self._skip(",")

    def _named(self) -> Steps:
        name = yield from self._word()
        if (yield from self._skip("[CALL_ID]")):
            yield from self._word()
        yield from self._skip("[ARGS]")
        yield from self._skip_space()
        if name and (yield from self._peek()) == "{":
            yield from self._arguments(self._begin(name))
        elif self._kept is not None:
            self._tell(self._text[self._kept : self._at])
            self._kept = None

    def _word(self) -> Generator[None, None, str]:
        characters = []
        while (yield from self._peek()) in _NAME:
            characters.append(self._text[self._at])
            self._at += 1
        return "".join(characters)


FORMATS: dict[str, type[ToolFormat]] = {"hermes": Hermes, "llama3_json": Llama3, "mistral": Mistral}


def held_to_calls(
    form: type[ToolFormat], tools: Sequence[Tool], *, parallel: bool, answer: str | None = None
) -> str:
    """A Lark grammar of answers that call tools, or else are `answer`: a rule's right side."""
    start = "start: calls" if answer is None else f"start: calls | answer\nanswer: {answer}"
    return f"%llguidance {{}}\n{start}\n{form.grammar(tools, parallel=parallel)}\n"


def detect(template: str) -> str | None:
    """The format that a chat template asks the model for; None when it is none of these."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and not any(
        other in template for other in ("<function=", "<arg_key>")
    ):
        return "hermes"
    if '"parameters": dictionary of argument name' in template or "<|python_tag|>" in template:
        return "llama3_json"
    return None


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`, and is not all of it."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def _objects(tools: Sequence[Tool], arguments: str) -> str:
    """Lark rules: `object` is a call of one of the tools."""
    rules = ["object: " + " | ".join(f"tool{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "{arguments}": ')
        rules.append(f'tool{i}: {head} %json {json.dumps(_schema(tool), ensure_ascii=False)} "}}"')
    return "\n".join(rules)


def _schema(tool: Tool) -> dict[str, Any]:
    schema = tool.function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    lenient = not tool.function.strict
    options = {"whitespace_flexible": False, "lenient": lenient, "coerce_one_of": lenient}
    return {
        "type": "object",
        **schema,
        "x-guidance": {**options, "item_separator": ", ", "key_separator": ": "},
    }
