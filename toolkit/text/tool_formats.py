"""Formats of tool calls in a model's text: a grammar that enforces each, and a streaming parser.

A parser's output does not depend on how the text is split. Text that is not a call is content. A
call is reported once its name is known and its arguments begin; an answer may be cut off inside.
The beginning of a call that is cut off before that is neither a call nor content."""

import abc
import json
import secrets
import string
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

MAX_PARALLEL = 32  # calls in an answer whose grammar is calls
_ALPHABET = string.ascii_letters + string.digits
_NAME_CHARACTERS = frozenset(_ALPHABET + "_.-")


class FunctionSpec(Protocol):
    """Function that the model may call."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any] | None:
        """JSON schema of the arguments."""
        ...

    @property
    def strict(self) -> bool | None: ...


class ToolSpec(Protocol):
    """Tool of a request."""

    @property
    def function(self) -> FunctionSpec: ...


class Codec(Protocol):
    """Tokenizer, as formats need it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(slots=True)
class ToolText:
    """New text: content, or arguments of call `index`, whose first part has the function's name.

    A format whose answers are several messages also reports reasoning, and where one begins."""

    text: str
    index: int | None = None
    name: str | None = None
    is_reasoning: bool = False
    begins_message: bool = False

    def continues(self, last: Self) -> bool:
        """Return True if this is more of the same text as `last`."""
        is_first = self.begins_message or self.name is not None
        same = self.index == last.index and self.is_reasoning == last.is_reasoning
        return same and not is_first


class EndError(Exception):
    """The answer has ended."""


class NoCallError(Exception):
    """Text that looked like a call is not one."""


Steps = Generator[None, None, None]
"""Parser that yields when it needs more text, and is resumed when there is more."""


class ToolFormat(abc.ABC):
    """Parser of one answer, in one format.

    A format is a subclass with `grammar` and `_read`. `_read` is a generator over the text at
    `self._at`. It calls the methods under "parsing" with `yield from`: they wait for text."""

    markers: ClassVar[tuple[str, ...]] = ()  # texts around calls. Often each is a special token

    def __init__(self, names: Sequence[str], *, parallel: bool = True) -> None:
        """`names`: functions that exist. Without `parallel`, only the first call counts."""
        self.num_calls = 0
        self.is_within_arguments = False  # the text so far ends inside a call's arguments
        self._names = frozenset(names)
        self._parallel = parallel
        self._text = ""
        self._at = 0
        self._candidate: int | None = None
        """Start of text that is a call or, if it turns out not to be one, content."""
        self._has_ended = self._is_cut = False
        self._waiting: list[str] = []  # arguments of the last call that are not emitted
        self._is_object: bool | None = None  # these arguments are an object. None: not known yet
        self._output: list[ToolText] = []
        self._steps = self._run()

    def add(self, text: str) -> list[ToolText]:
        """Return what can be said now. Text that may begin a call is held back."""
        begin = self._at if self._candidate is None else self._candidate
        self._text = self._text[begin:] + text
        self._at -= begin
        self._candidate = None if self._candidate is None else 0
        return self._resume()

    def end(self, *, is_cut: bool = False) -> list[ToolText]:
        """Return the rest: no more text follows. `is_cut`: the model would have gone on."""
        self._has_ended, self._is_cut = True, is_cut
        return self._resume()

    @staticmethod
    def new_id() -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    @classmethod
    def opening_of(cls, prompt: list[int], tokenizer: Codec) -> str:
        """Return the text at the prompt's end that the answer continues, for the parser to read."""
        return ""

    @classmethod
    @abc.abstractmethod
    def grammar(cls, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return Lark rules. Their rule `calls` is one call or, if `parallel`, several."""

    @classmethod
    def answer_grammar(
        cls,
        tools: Sequence[ToolSpec],
        *,
        parallel: bool,
        answer_rule: str | None = None,
        opening: str = "",
    ) -> str:
        """Return a Lark grammar of calls or, if given, of answers that match `answer_rule`.

        `opening`: see `opening_of`."""
        start = "start: calls"
        if answer_rule is not None:
            start += f" | answer\nanswer: {answer_rule}"
        return f"%llguidance {{}}\n{start}\n{cls.grammar(tools, parallel=parallel)}\n"

    @abc.abstractmethod
    def _read(self) -> Steps:
        """Parse up to the end of the last call that counts."""

    def _run(self) -> Steps:
        try:
            yield from self._read()
        except EndError:
            rest = "" if self._candidate is None else self._text[self._candidate :]
            if not (self._is_cut and self._may_become_call(rest)):
                self._emit(rest)

    def _may_become_call(self, rest: str) -> bool:
        """Return True if the rest of a cut answer, which may have a marker, begins a call."""
        return True

    def _resume(self) -> list[ToolText]:
        next(self._steps, None)
        output, self._output = self._output, []
        return output

    def _emit(self, text: str, index: int | None = None, name: str | None = None) -> None:
        self._report(ToolText(text, index, name))

    def _report(self, new: ToolText) -> None:
        last = self._output[-1] if self._output else None
        if last is not None and new.continues(last):
            last.text += new.text
        elif new.text or new.name is not None:
            self._output.append(new)

    # ---- parsing

    def _peek(self) -> Generator[None, None, str]:
        """Return the next character. Raises EndError at the end."""
        while self._at == len(self._text):
            if self._has_ended:
                raise EndError
            yield
        return self._text[self._at]

    def _skip_space(self) -> Steps:
        while (yield from self._peek()).isspace():
            self._at += 1

    def _skip(self, marker: str) -> Generator[None, None, bool]:
        """Skip a marker. Returns False if it is not there."""
        while len(self._text) - self._at < len(marker) and marker.startswith(
            self._text[self._at :]
        ):
            if self._has_ended:
                if self._is_cut:
                    raise EndError
                return False
            yield
        if not self._text.startswith(marker, self._at):
            return False
        self._at += len(marker)
        return True

    def _content_until(self, marker: str) -> Steps:
        """Emit content up to a marker, without the space before it, and skip the marker."""
        while True:
            found = self._text.find(marker, self._at)
            if found >= 0:
                content = self._text[self._at : found].rstrip()
                self._emit(content)
                self._candidate = self._at + len(content)
                self._at = found + len(marker)
                return
            size = partial_marker_size(self._text[self._at :], marker)
            certain = self._at + len(self._text[self._at : len(self._text) - size].rstrip())
            self._emit(self._text[self._at : certain])
            self._at = certain
            if self._has_ended:
                rest = self._text[certain:]
                is_markup = (self._is_cut and size > 1) or (self.num_calls and rest.isspace())
                self._emit("" if is_markup else rest)
                raise EndError
            yield

    def _call(self) -> Generator[None, None, bool]:
        """Parse {"name": ..., "arguments": ...}. Other text is content: returns False."""
        if self._candidate is None:
            self._candidate = self._at
        try:
            yield from self._members()
        except NoCallError:
            if self._candidate is not None:
                self._emit(self._text[self._candidate : self._at])
                self._candidate = None
                return False
        return True

    def _members(self) -> Steps:
        name, index = None, None
        early_arguments: list[str] = []  # they came before the name
        if not (yield from self._skip("{")):
            raise NoCallError
        while True:
            yield from self._skip_space()
            if (yield from self._skip("}")):
                break
            if (yield from self._skip(",")):
                continue
            key = yield from self._string()
            yield from self._skip_space()
            if not (yield from self._skip(":")):
                raise NoCallError
            yield from self._skip_space()
            if key == "name" and name is None:
                name = yield from self._string()
                self._check_name(name)
            elif key in ("arguments", "parameters") and name is not None and index is None:
                index = self._begin(name)
                yield from self._arguments(index)
            elif key in ("arguments", "parameters") and index is None:
                early_arguments.clear()
                yield from self._value(early_arguments.append)
            else:
                yield from self._value(lambda character: None)
        if name is None:
            raise NoCallError
        if index is None:
            index = self._begin(name)
            self._emit(arguments_object("".join(early_arguments)), index)

    def _begin(self, name: str) -> int:
        """Report a call, and return its index."""
        index = self.num_calls
        self.num_calls += 1
        self._candidate = None
        self._waiting, self._is_object = [], None
        self._emit("", index, name)
        return index

    def _arguments(self, index: int) -> Steps:
        """Parse the arguments of a call, and emit them as they arrive."""
        self.is_within_arguments = True
        yield from self._value(lambda character: self._write_arguments(character, index))
        self._close_arguments(index)

    def _write_arguments(self, text: str, index: int) -> None:
        """Emit arguments. Those that are no object wait for their end."""
        if not self._is_object:
            self._waiting.append(text)
            if self._is_object is None and text.strip():
                self._is_object = text.lstrip().startswith("{")
            if not self._is_object:
                return
            text = "".join(self._waiting)
        self._emit(text, index)

    def _close_arguments(self, index: int) -> None:
        """End the arguments of a call."""
        if not self._is_object:
            self._emit(arguments_object("".join(self._waiting).strip()), index)
        self.is_within_arguments = False

    def _check_name(self, name: str) -> None:  # noqa: B027  # most formats accept any name
        """Raises NoCallError for the name of an object that is not a call."""

    def _string(self) -> Generator[None, None, str]:
        characters: list[str] = []
        yield from self._value(characters.append)
        try:
            value = json.loads("".join(characters), strict=False)
        except (ValueError, RecursionError):
            raise NoCallError from None
        if not isinstance(value, str):
            raise NoCallError
        return value

    def _value(self, emit: Callable[[str], None]) -> Steps:
        """Emit one JSON value, character by character. Its inside is not validated."""
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
                    raise NoCallError
                return
            elif character in "}]":
                depth -= 1
            self._at += 1
            emit(character)
            empty = False
            if depth == 0 and not in_string and character in '"}]':
                return


class HermesFormat(ToolFormat):
    """Hermes, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    markers = ("<tool_call>", "</tool_call>")

    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        more = f' ("\\n" call){{0,{MAX_PARALLEL - 1}}}' if parallel else ""
        rules = f'calls: call{more}\ncall: "<tool_call>\\n" object "\\n</tool_call>"'
        return f"{rules}\n{object_rules(tools, 'arguments')}"

    def _read(self) -> Steps:
        while self._parallel or not self.num_calls:
            yield from self._content_until("<tool_call>")
            yield from self._skip_space()
            if (yield from self._call()):
                yield from self._skip_space()
                while (yield from self._skip("}")):  # models write one too many
                    yield from self._skip_space()
                yield from self._skip("</tool_call>")


class Llama3Format(ToolFormat):
    """Llama 3.1 to 3.3: the answer is `{"name": ..., "parameters": {...}}`, or several with `;`."""

    markers = ("<|python_tag|>",)

    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        more = f' ("; " object){{0,{MAX_PARALLEL - 1}}}' if parallel else ""
        return f"calls: object{more}\n{object_rules(tools, 'parameters')}"

    def _read(self) -> Steps:
        self._candidate = 0
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
        """Emit the rest of the answer."""
        self._at = self._at if self._candidate is None else self._candidate
        self._candidate = None
        while True:
            yield from self._peek()
            self._emit(self._text[self._at :])
            self._at = len(self._text)

    def _check_name(self, name: str) -> None:
        if name not in self._names:  # the answer may be JSON that is not a call
            raise NoCallError

    def _may_become_call(self, rest: str) -> bool:
        text = "".join(rest.split())
        heads = ['{"type":"function"', *(f'{{"name":"{name}"' for name in self._names)]
        heads += [self.markers[0] + head for head in heads]
        return self.num_calls > 0 or any(
            head.startswith(text) or text.startswith(head) for head in heads
        )


class MistralFormat(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME{...}` each."""

    markers = ("[TOOL_CALLS]", "[ARGS]")

    @staticmethod
    def new_id() -> str:
        """Return nine letters and digits: Mistral's templates accept nothing else."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        more = f' (", " object){{0,{MAX_PARALLEL - 1}}}' if parallel else ""
        return f'calls: "[TOOL_CALLS][" object{more} "]"\n{object_rules(tools, "arguments")}'

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
        elif self._candidate is not None:
            self._emit(self._text[self._candidate : self._at])
            self._candidate = None

    def _word(self) -> Generator[None, None, str]:
        characters = []
        while (yield from self._peek()) in _NAME_CHARACTERS:
            characters.append(self._text[self._at])
            self._at += 1
        return "".join(characters)


def arguments_object(text: str) -> str:
    """Return arguments as the JSON of an object, which clients expect.

    Models also write an object as a string, or something else for no arguments. Text that is not
    JSON stays."""
    try:
        value = json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return arguments_object(value) if value.lstrip().startswith("{") else "{}"
    return text if text and isinstance(value, dict) else "{}"


def partial_marker_size(text: str, marker: str) -> int:
    """Return the length of the incomplete marker at the end of `text`; 0 if there is none."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def object_rules(tools: Sequence[ToolSpec], arguments: str) -> str:
    """Return Lark rules. Their rule `object` is a call of one tool."""
    rules = ["object: " + " | ".join(f"tool{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "{arguments}": ')
        rules.append(
            f'tool{i}: {head} %json {json.dumps(arguments_schema(tool), ensure_ascii=False)} "}}"'
        )
    return "\n".join(rules)


def arguments_schema(tool: ToolSpec) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, with llguidance's options."""
    schema = tool.function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    lenient = not tool.function.strict
    options = {
        **schema.get("x-guidance", {}),
        "whitespace_flexible": False,
        "lenient": lenient,
        "coerce_one_of": lenient,
        "item_separator": ", ",
        "key_separator": ": ",
    }
    return {"type": "object", **schema, "x-guidance": options}
