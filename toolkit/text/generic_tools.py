"""Tools for models whose chat template has none, or a format of calls that tk does not know.

The prompt describes the tools and asks for calls in JSON. llama.cpp has such a format, too; unlike
there, other answers are plain text."""

import json
import re
from collections.abc import Generator, Sequence
from typing import Any

from toolkit.text.tool_formats import (
    MAX_PARALLEL,
    EndError,
    NoCallError,
    Steps,
    ToolFormat,
    ToolSpec,
    object_rules,
)

_OPENINGS = ("```", "<tool_call>")
_CLOSINGS = ("]", ",", ";", "```", "</tool_call>")
_OPENING = re.compile(r"(?:```\w*|<tool_call>)?\[?")


class GenericFormat(ToolFormat):
    """`{"name": ..., "arguments": {...}}` at the beginning of a line.

    Models also put it into a list, a block of code or `<tool_call>` tags. An object that names no
    function of the request is content."""

    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        more = f' ("\\n" object){{0,{MAX_PARALLEL - 1}}}' if parallel else ""
        return f"calls: object{more}\n{object_rules(tools, 'arguments')}"

    def _read(self) -> Steps:
        self._candidate = 0
        try:
            while self._parallel or not self.num_calls:
                yield from self._skip_space()
                yield from self._skip_opening()
                if (yield from self._peek()) == "{" and (yield from self._call()):
                    yield from self._skip_closings()
                else:
                    yield from self._line()
        except EndError:
            if self.num_calls and self._candidate is not None:
                rest = self._text[self._candidate :]
                self._candidate = None if rest.isspace() else self._candidate
            raise

    def _skip_opening(self) -> Steps:
        if (yield from self._skip(_OPENINGS[0])):
            while (yield from self._peek()).isalnum():  # the language of a block of code
                self._at += 1
        else:
            yield from self._skip(_OPENINGS[1])
        yield from self._skip_space()
        yield from self._skip("[")
        yield from self._skip_space()

    def _skip_closings(self) -> Steps:
        yield from self._skip_space()
        while (yield from self._skip_any(_CLOSINGS)):
            yield from self._skip_space()
        self._candidate = self._at

    def _skip_any(self, markers: Sequence[str]) -> Generator[None, None, bool]:
        for marker in markers:
            if (yield from self._skip(marker)):
                return True
        return False

    def _line(self) -> Steps:
        """Emit the rest of the line, without the space at its end, which may precede a call."""
        begin = self._at if self._candidate is None else self._candidate
        while True:
            self._candidate = None
            end = self._text.find("\n", self._at)
            content = self._text[begin:] if end < 0 else self._text[begin:end]
            self._emit(content.rstrip())
            self._candidate = begin = begin + len(content.rstrip())
            if end >= 0:
                self._at = end + 1
                return
            self._at = len(self._text)
            yield from self._peek()
            begin = self._candidate

    def _check_name(self, name: str) -> None:
        if name not in self._names:
            raise NoCallError

    def _may_become_call(self, rest: str) -> bool:
        text = "".join(rest.split())
        if any(opening.startswith(text) for opening in _OPENINGS):
            return True
        text = _OPENING.sub("", text, count=1)
        heads = [f'{{"name":"{name}"' for name in self._names]
        return any(head.startswith(text) or text.startswith(head) for head in heads)


def describe_tools(tools: Sequence[dict[str, Any]], *, parallel: bool) -> str:
    """Return instructions for a model. `tools`: as chat templates take them."""
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    several = " To call several, write each object on its own line." if parallel else ""
    return (
        "You can call functions. To call one, answer with a JSON object and nothing else:\n"
        '{"name": "the function\'s name", "arguments": {"an argument\'s name": "its value"}}\n'
        f"{several}The result follows in the next message. If no function is needed, answer in "
        "plain text.\n\nThe functions, with JSON schemas of their arguments:\n"
        + "\n".join(functions)
    )


def write_out(
    messages: Sequence[dict[str, Any]], instructions: str, *, has_system: bool
) -> list[dict[str, Any]]:
    """Return a conversation as templates without tools take it.

    Calls become text of the assistant, results become text of the user, and `instructions` are the
    end of the system message, or without `has_system`, like all system messages at the beginning,
    the beginning of the user's first message. Messages of the user that follow results join them:
    many templates demand that roles alternate."""
    names: dict[str, str] = {}
    written: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        is_result = message["role"] == "tool"
        one = _result(message, names) if is_result else _with_calls(message)
        if one["role"] == "user" and follows_result:
            written[-1] = _joined(written[-1], one)
        else:
            written.append(one)
        follows_result = is_result or (follows_result and one["role"] == "user")
    systems = 0
    while systems < len(written) and written[systems]["role"] in ("system", "developer"):
        systems += 1
    head, rest = written[:systems], written[systems:]
    if instructions:
        head.append({"role": "system", "content": instructions})
    if not head:
        return rest
    system = head[0]
    for more in head[1:]:
        system = _joined(system, more)
    if has_system:
        return [system, *rest]
    if rest and rest[0]["role"] == "user":
        return [_joined({**system, "role": "user"}, rest[0]), *rest[1:]]
    return [{**system, "role": "user"}, *rest]


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls are part of its content."""
    if not (calls := message.get("tool_calls")):
        return message
    lines = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        lines.append(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}')
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    text = {"role": message["role"], "content": "\n".join(lines)}
    return {**rest, "content": _joined(message, text, "\n")["content"]}


def _result(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    name = names.get(message.get("tool_call_id", "")) or message.get("name")
    head = f"Result of {name}:" if name else "Result:"
    return _joined({"role": "user", "content": head}, message, "\n")


def _joined(first: dict[str, Any], second: dict[str, Any], joint: str = "\n\n") -> dict[str, Any]:
    """Return the first message with the content of both."""
    one, two = first["content"] or "", second["content"] or ""
    if isinstance(one, str) and isinstance(two, str):
        return {**first, "content": joint.join(filter(None, (one, two)))}
    parts = [_parts(one), [{"type": "text", "text": joint}], _parts(two)]
    return {**first, "content": [part for each in parts for part in each]}


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
