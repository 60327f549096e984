"""Harmony, the format of gpt-oss: an answer is messages, which have channels and recipients.

Source: https://github.com/openai/harmony/blob/main/docs/format.md. Channel `analysis` is reasoning,
a message to `functions.NAME` is a call, other messages are content: `final`, and the preambles
without a recipient in `commentary`. Commentary to others, such as the built-in tools `python` and
`browser`, is reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidParamError
from toolkit.text.tool_formats import EndError, Steps, ToolFormat, ToolText, arguments_schema

if TYPE_CHECKING:
    from toolkit.text.chat_template import Message
    from toolkit.text.tool_formats import Codec, ToolSpec

START, END, CHANNEL, MESSAGE, CONSTRAIN = (
    f"<|{name}|>" for name in ("start", "end", "channel", "message", "constrain")
)
ANSWER_ENDS = ("<|return|>", "<|call|>")
_ENDS = (END, *ANSWER_ENDS)  # of a message
_MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_MAX_HEADER = 256  # characters of a header, without its marks at both ends
_ROLE = "assistant"
_FUNCTIONS = "functions."
_INSTRUCTIONS = ("system", "developer")  # roles
_EFFORTS = ("low", "medium", "high")

_HEADER = re.compile(
    rf"(?:(?!<\|)[\s\S]|{re.escape(CHANNEL)}|{re.escape(CONSTRAIN)})*{re.escape(MESSAGE)}"
)
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}([^\s<]*)")
_RECIPIENT = re.compile(r"(?<!\S)to=([^\s<]+)")
_FIELDS = (CHANNEL, CONSTRAIN, MESSAGE, "to=")  # what can follow a header's role

_THOUGHT = r"THOUGHT: /([^<]|<+[^<|])*<+\|end\|><\|start\|>assistant/"
"""Rest of a message of reasoning, up to the next header. Without other marks. One terminal:
llguidance's lexer is greedy."""


def is_harmony(template: str) -> bool:
    """Return True if a chat template writes harmony."""
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))


class HarmonyFormat(ToolFormat):
    """Parser of one answer. It also reports reasoning.

    Without functions nothing is a call. What is no message is content, without its marks. If the
    answer is cut inside a header, that header is dropped."""

    markers = (START, END, CHANNEL, MESSAGE, CONSTRAIN)  # not the tokens that end an answer

    @classmethod
    def opening_of(cls, prompt: list[int], tokenizer: Codec) -> str:
        """Return the message that the prompt leaves open, without its content."""
        [start, *others] = tokenizer.encode(START, add_special_tokens=False)
        if others or start not in prompt:
            return ""
        at = len(prompt) - 1 - prompt[::-1].index(start)
        text = tokenizer.decode(prompt[at:], skip_special_tokens=False)
        header, mark, content = text.partition(MESSAGE)
        return "" if any(end in content for end in _ENDS) else header + mark

    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return rules of one call: the token after it ends the answer."""
        rules = ["calls: " + " | ".join(f"call{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            to = f"to={_FUNCTIONS}{tool.function.name}"
            headers = [
                f"{CHANNEL}commentary {to} {CONSTRAIN}json{MESSAGE}",
                f" {to}{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}",
                f" {to}{CHANNEL}commentary json{MESSAGE}",
            ]
            choices = " | ".join(map(json.dumps, headers))
            schema = json.dumps(arguments_schema(tool), ensure_ascii=False)
            rules.append(f"call{i}: ({choices}) %json {schema}")
        return "\n".join(rules)

    @classmethod
    def answer_grammar(
        cls,
        tools: Sequence[ToolSpec],
        *,
        parallel: bool,
        answer_rule: str | None = None,
        opening: str = "",
    ) -> str:
        """Return a grammar of reasoning, then a call or the content of a final message."""
        header, is_content, _ = opening.partition(MESSAGE)
        if is_content and _is_reasoning(header):
            begin = "THOUGHT thought*"
        elif is_content:
            if answer_rule is None:
                raise InvalidParamError(
                    "tool_choice", "requires a call, which cannot continue the last message."
                )
            return f"start: {answer_rule}\n"
        elif opening.endswith(_ROLE):
            begin = "thought*"
        else:
            begin = f'"{START}{_ROLE}" thought*'
        ends = ["calls"] * bool(tools) + ["answer"] * (answer_rule is not None)
        rules = [
            f"start: {begin} ({' | '.join(ends)})",
            f'thought: "{CHANNEL}analysis{MESSAGE}" THOUGHT\n{_THOUGHT}',
        ]
        if tools:
            rules.append(cls.grammar(tools, parallel=parallel))
        if answer_rule is not None:
            rules.append(f'answer: "{CHANNEL}final{MESSAGE}" {answer_rule}')
        return "\n".join(rules) + "\n"

    def _read(self) -> Steps:
        write = self._writer(is_reasoning=False)
        try:
            while True:
                mark = yield from self._write_until_mark(write)
                if mark in (MESSAGE, CONSTRAIN):  # out of place
                    continue
                self._close_call()
                if self.num_calls and not self._parallel:
                    return
                write = self._writer(is_reasoning=False)
                if mark in (START, CHANNEL):
                    header = yield from self._header(mark)
                    write = self._open(header) if header is not None else write
        except EndError:
            if not self._is_cut:
                self._close_call()
            raise

    def _write_until_mark(self, write: Callable[[str], None]) -> Generator[None, None, str]:
        """Write text up to a mark. Skip and return the mark."""
        while True:
            found = _MARK.search(self._text, self._at)
            end = found.start() if found is not None else self._certain_end()
            write(self._text[self._at : end])
            self._at = end
            if found is not None:
                self._at = found.end()
                return found[0]
            if self._has_ended:
                rest = self._text[end:]
                write("" if self._is_cut and len(rest) > 1 else rest)
                raise EndError
            yield

    def _certain_end(self) -> int:
        """Return the end of the text that cannot begin a mark."""
        at = self._text.rfind("<", self._at)
        if at >= 0 and any(mark.startswith(self._text[at:]) for mark in _MARKS):
            return at
        return len(self._text)

    def _header(self, mark: str) -> Generator[None, None, str | None]:
        """Read the header after a mark. Returns both; None if the text is no header."""
        self._candidate = self._at
        while True:
            text = self._text[self._candidate : self._candidate + _MAX_HEADER + 1]
            found = _HEADER.match(text, 0, _MAX_HEADER)
            if found is not None and _begins_header(mark, found[0]):
                self._at = self._candidate + found.end()
                self._candidate = None
                return mark + found[0]
            is_short = len(text) <= _MAX_HEADER
            may_be = is_short and MESSAGE not in text and _begins_header(mark, text)
            if self._has_ended and self._is_cut and may_be:
                raise EndError  # which drops the candidate
            if self._has_ended or not may_be:
                is_assistant = mark == START and text.startswith(_ROLE)
                self._at = self._candidate + (len(_ROLE) if is_assistant else 0)
                self._candidate = None
                return None
            yield

    def _open(self, header: str) -> Callable[[str], None]:
        """Begin a message. Returns what writes its content."""
        recipient = _recipient(header)
        name = recipient.removeprefix(_FUNCTIONS)
        if name and (name in self._names or (self._names and name != recipient)):
            index = self._begin(name)
            self.is_within_arguments = True
            return lambda text: self._write_arguments(text, index)
        return self._writer(is_reasoning=_is_reasoning(header))

    def _writer(self, *, is_reasoning: bool) -> Callable[[str], None]:
        """Return what writes the text of one message."""
        begins = True

        def write(text: str) -> None:
            nonlocal begins
            if text:
                self._report(ToolText(text, is_reasoning=is_reasoning, begins_message=begins))
                begins = False

        return write

    def _close_call(self) -> None:
        if self.is_within_arguments:
            self._close_arguments(self.num_calls - 1)


def content_of(answer: str, *, opening: str = "", is_cut: bool = False) -> str:
    """Return an answer without reasoning and calls. Empty lines separate its messages.

    `answer`: with its marks. `opening`: see `opening_of`. `is_cut`: the model would have gone
    on."""
    parser = HarmonyFormat([])
    parser.add(opening)
    content: list[str] = []
    for part in [*parser.add(answer), *parser.end(is_cut=is_cut)]:
        if not part.is_reasoning:
            content += ["\n\n"] * (part.begins_message and bool(content)) + [part.text]
    return "".join(content)


def _begins_header(mark: str, text: str) -> bool:
    """Return True if text after a mark is a header, or can begin one."""
    if set(_MARK.findall(text)) - {CHANNEL, CONSTRAIN, MESSAGE}:
        return False
    if mark == CHANNEL:
        return True
    role = _ROLE if text.startswith(_ROLE) else re.split(r"[\s<]", text, maxsplit=1)[0]
    rest = text[len(role) :].lstrip()
    return not rest or any(rest.startswith(one) or one.startswith(rest) for one in _FIELDS)


def _recipient(header: str) -> str:
    found = _RECIPIENT.search(header)
    return found[1] if found is not None else ""


def _is_reasoning(header: str) -> bool:
    found = _CHANNEL.search(header)
    channel = found[1] if found is not None else ""
    return channel == "analysis" or (channel != "final" and bool(_recipient(header)))


# ---- conversations


def adapt_conversation(
    messages: list[Message], options: Mapping[str, Any]
) -> tuple[list[Message], dict[str, Any]]:
    """Return messages and options of a chat template as gpt-oss's takes them.

    It renders one instruction, at the beginning; one call of a message; one text before it; and
    only functions with a description. Raises InvalidRequestError for an effort that the model does
    not know, and for its built-in tools."""
    effort = options.get("reasoning_effort")
    if effort is not None and effort not in _EFFORTS:
        raise InvalidParamError(
            "reasoning_effort", f"must be low, medium or high for this model; got {effort!r}."
        )
    if options.get("builtin_tools"):
        raise InvalidParamError(
            "chat_template_kwargs",
            "cannot set builtin_tools: this server runs neither the browser nor the python tool. "
            "Send functions as tools.",
        )
    changed = dict(options)
    if "tools" in options:
        changed["tools"] = [
            {**tool, "function": {"description": "", **tool["function"]}}
            for tool in options["tools"]
        ]
    return _with_single_calls(_with_one_instruction(messages)), changed


def _with_one_instruction(messages: list[Message]) -> list[Message]:
    found = [one for one in messages if one["role"] in _INSTRUCTIONS]
    if not found:
        return messages
    text = "\n\n".join(one["content"] for one in found if one["content"])
    rest = (one for one in messages if one["role"] not in _INSTRUCTIONS)
    return [found[0] | {"content": text}, *rest]


def _with_single_calls(messages: list[Message]) -> list[Message]:
    """Split messages with several calls. Each call is followed by its result."""
    changed: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if not message.get("tool_calls"):
            changed.append(message)
            continue
        results: dict[Any, list[Message]] = {}
        while at < len(messages) and messages[at]["role"] == "tool":
            results.setdefault(messages[at].get("tool_call_id"), []).append(messages[at])
            at += 1
        message = _with_one_text(message)
        for call in message["tool_calls"]:
            changed.append(message | {"tool_calls": [call]})
            changed += results.pop(call["id"], [])
            message = {"role": _ROLE, "content": ""}
        changed += [one for others in results.values() for one in others]
    return changed


def _with_one_text(message: Message) -> Message:
    """Join reasoning and preamble: the template writes either as reasoning."""
    thoughts = message.get("reasoning_content")
    if not thoughts or not message["content"]:
        return message
    return message | {"content": "", "reasoning_content": f"{thoughts}\n\n{message['content']}"}
