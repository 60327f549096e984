"""Render a conversation with a Jinja chat template, like Transformers.

Templates run in the sandbox of `template_sandbox`. Those of requests run in other processes
(`template_pool`)."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError
from toolkit.files import failure, parse_json, read_text
from toolkit.text.template_sandbox import compile_template, run

_END_MARKER = "END_OF_THE_TEXT_TO_CONTINUE "
"""Letters, which no filter escapes, and a space, which is missing if the template strips text."""
_PROBE = "QUESTION"
"""Letters, which no filter escapes."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Templates read the first; those of gpt-oss read the second."""

MAX_TEMPLATE = 512 * 2**10
"""Characters of a chat template. The longest known has 40,000; compiling a longer one could take
minutes and gigabytes."""

Message = dict[str, Any]


class ChatTemplates:
    """Templates of a model by name, and the special tokens that they can use."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._templates = templates
        self._special_tokens = special_tokens

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def text(self) -> str:
        """Source of all templates, joined."""
        return "\n".join(self._templates.values())

    @property
    def source(self) -> str | None:
        """Source of the default template, if there is one."""
        return self._templates.get("default")

    def find(self, name_or_source: str) -> str:
        """Return the source of a template."""
        return self._templates.get(name_or_source, name_or_source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> str:
        """Return the prompt of a conversation. For options and errors see `render_template`.

        chat_template: name or source of a template to use. By default "tool_use" if there are
        tools and such a template, otherwise "default"."""
        template = self._choose(chat_template, tools)
        return render_template(template, self._special_tokens, messages, tools=tools, **options)

    def _choose(self, name_or_source: str | None, tools: Sequence[Any] | None) -> str:
        if name_or_source is not None:
            return self.find(name_or_source)
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise ValueError(
                f"none of its templates ({', '.join(sorted(self._templates))}) is the default; "
                "choose one with chat_template"
            )
        return self._templates["default"]


def render_template(
    template: str,
    special_tokens: dict[str, str],
    /,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    **variables: Any,
) -> str:
    """Return the prompt of a conversation.

    tools: JSON schemas, or functions: their signature and docstring become a schema.
    continue_final_message: leave the last message open for the model to continue. A text names
    the field to continue, instead of "content".
    variables: the template's own, such as enable_thinking.

    Raises ValueError or TypeError for a wrong conversation, jinja2.TemplateError from the
    template, and any error of its expressions on values of the wrong type: see `describe`."""
    if not messages:
        raise ValueError("the conversation is empty")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    conversation = [_message(message) for message in messages]
    if any(isinstance(one.get("content"), str) for one in conversation) and _loses_texts(template):
        conversation = [_in_parts(message) for message in conversation]
    final = None
    if continue_final_message:
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        final = _mark_end(conversation, field, template)
    text = run(
        _compiled(template),
        {
            **special_tokens,
            **variables,
            "messages": conversation,
            "tools": None if tools is None else [_schema(tool) for tool in tools],
            "documents": None if documents is None else [_document(one) for one in documents],
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return text if final is None else _cut_at_marker(text, final)


_compiled = functools.lru_cache(maxsize=8)(compile_template)


@functools.lru_cache(maxsize=8)
def _loses_texts(template: str) -> bool:
    """Return True if a template omits content that is text, and writes content that is parts.

    Those of some models that see do, such as SmolVLM's."""
    if "type" not in template:
        return False
    texts = []
    for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
        variables = {"messages": [{"role": "user", "content": content}], "tools": None}
        try:
            texts.append(run(_compiled(template), {**variables, "add_generation_prompt": True}))
        except Exception:  # expressions raise any type
            return False
    return _PROBE not in texts[0] and _PROBE in texts[1]


@functools.lru_cache(maxsize=8)
def has_system(template: str) -> bool:
    """Return True if a template writes a system message."""
    messages = [{"role": role, "content": f"{_PROBE} {role}"} for role in ("system", "user")]
    if _loses_texts(template):
        messages = [_in_parts(message) for message in messages]
    variables = {"messages": messages, "tools": None, "add_generation_prompt": True}
    try:
        return f"{_PROBE} system" in run(_compiled(template), variables)
    except Exception:  # the template refuses the role, as Gemma's
        return False


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


def describe(error: Exception) -> str:
    """Describe an error of `render_template` in a phrase."""
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    return str(error) or type(error).__name__


def read_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return a folder's templates by name.

    They are in `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else in
    chat_template.json (of processors, for models that see or hear), else in tokenizer_config.json.
    Raises ValueError and TypeError for files that cannot be used."""
    files = {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / "chat_template.jinja").is_file():
        files.setdefault("default", folder / "chat_template.jinja")
    if files:
        return _of_bounded_size({name: read_text(path) for name, path in files.items()})
    if (processor := folder / "chat_template.json").is_file():
        given = parse_json(read_text(processor))
        if isinstance(given, dict) and given.get("chat_template"):
            return templates_by_name(given["chat_template"])
    return templates_by_name(tokenizer_config.get("chat_template"))


def templates_by_name(value: Any) -> dict[str, str]:
    """Parse chat_template of tokenizer_config.json: a template, or a list of named templates."""
    if not value:
        return {}
    if isinstance(value, list):
        value = {one["name"]: one["template"] for one in value}
    templates = value if isinstance(value, dict) else {"default": value}
    if not all(isinstance(template, str) for template in templates.values()):
        raise TypeError("a chat template must be a text")
    return _of_bounded_size(templates)


def _of_bounded_size(templates: dict[str, str]) -> dict[str, str]:
    size = max(map(len, templates.values()))
    if size > MAX_TEMPLATE:
        raise ValueError(f"its chat template has {size} characters, more than {MAX_TEMPLATE}")
    return templates


def load_template(file_or_source: str) -> str:
    """Return the template of `--chat-template`. A value with a brace is a template, not a file.

    Raises ConfigError if the file cannot be read, or is not a template."""
    from jinja2 import TemplateSyntaxError

    source = file_or_source
    if "{" not in file_or_source:
        try:
            source = read_text(Path(file_or_source), MAX_TEMPLATE)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--chat-template takes a file or a template; {file_or_source!r} cannot be read: "
                f"{failure(error)}.",
                param="chat_template",
            ) from None
    try:
        compile_template(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"The template of --chat-template has a syntax error in line {error.lineno}: "
            f"{error.message}",
            param="chat_template",
        ) from None
    return source


# ---- input of a template


def _message(message: Message) -> Message:
    """Drop null fields, which templates would print, and add the reasoning under every name."""
    if not isinstance(message, dict):
        raise TypeError(f"a message must be a dict, not {message!r}")
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _schema(tool: Any) -> Any:
    if isinstance(tool, dict):
        return tool
    if not callable(tool):
        raise TypeError("a tool must be a JSON schema or a function")
    from transformers.utils import get_json_schema

    return get_json_schema(tool)


def _document(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise TypeError("a document must be a dict with a title and a text")
    return document


def _mark_end(conversation: list[Message], field: str, template: str) -> str:
    """Append the end marker to the last message's text, and return the text without it."""
    last = conversation[-1]
    if field not in last:
        raise ValueError(f"the last message has no {field!r} to continue")
    names = [field]
    if field in _REASONING_FIELDS:
        names = [name for name in _REASONING_FIELDS if name in last]
    if not any(name in template for name in names):
        raise ValueError(f"the template does not read {field!r}, so it cannot be continued")
    value = last[field]
    if not isinstance(value, list | tuple):
        last.update({name: value + _END_MARKER for name in names if last[name] == value})
        return str(value)
    parts = list(value)
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            text = parts[index]["text"]
            parts[index] = {**parts[index], "text": text + _END_MARKER}
            last[field] = parts
            return str(text)
    raise ValueError("the last message has no text to continue")


def _cut_at_marker(rendered: str, final: str) -> str:
    marker = _END_MARKER.strip()
    if marker not in rendered or final.strip() not in rendered:
        raise ValueError("the template omits a part of the last message, so it cannot be continued")
    at = rendered.rindex(marker)
    text = rendered[:at] if rendered.startswith(_END_MARKER, at) else rendered[:at].rstrip()
    # A template that writes the message twice leaves a marker in the text.
    return text.replace(_END_MARKER, "").replace(marker, "")
