"""A conversation as text, by the Jinja template that comes with a model, as Transformers renders it.

Templates come with checkpoints, and from clients where the server lets them: they are not trusted (`engine.sandbox`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError
from toolkit.text.template_sandbox import compile_template, run

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
        self._compiled = functools.lru_cache(maxsize=8)(compile_template)

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
        text = run(
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
    files = {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
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
        compile_template(source)
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
        raise ValueError(
            "the template leaves out a part of the last message, so that it cannot be continued"
        )
    at = rendered.rindex(mark)
    text = rendered[:at] if rendered.startswith(_TAG, at) else rendered[:at].rstrip()
    return text.replace(_TAG, "").replace(mark, "")  # of a template that writes the message twice
