"""Structural tags: free text with constrained parts, described in JSON.

The format is that of xgrammar and vLLM: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html.
An older one has `triggers` and `structures`, each with `begin`, `schema` and `end`."""

import json
from collections.abc import Callable
from typing import Any

FORMATS = (
    "const_string", "json_schema", "regex", "any_text", "sequence", "or", "tag", "triggered_tags",
    "tags_with_separator",
)  # fmt: skip
ANY_TEXT = "/(?s:.*)/"


class StructuralTag:
    """A structural tag as a Lark grammar, with llguidance's extensions.

    Raises ValueError for one that is not valid."""

    def __init__(
        self,
        given: Any,
        write_schema: Callable[[Any], str],
        write_regex: Callable[[str], str],
    ) -> None:
        """`write_schema`, `write_regex` return what a rule has for a schema or an expression."""
        self._write_schema, self._write_regex = write_schema, write_regex
        self._lines: list[str] = []
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError("must be an object")
        if "format" in given:
            start = self._format(given["format"], "format", is_last=True)
        else:
            start = self._triggered(_modernized(given), "", is_last=True)
        self.lark = "\n".join([f"start: {start}", *self._lines])

    def _format(self, given: Any, place: str, *, is_last: bool) -> str:
        """Return the name of the rule of a format. `is_last`: nothing follows it."""
        if not isinstance(given, dict):
            raise ValueError(f"{place} must be an object")
        kind = given.get("type")
        if kind not in FORMATS:
            raise ValueError(f"{place}.type must be one of {', '.join(FORMATS)}; got {kind!r}")
        if kind == "const_string":
            return self._rule(_quoted(_text(given, "value", place)))
        if kind == "json_schema":
            if not isinstance(given.get("json_schema"), dict | bool):
                raise ValueError(f"{place}.json_schema must be a JSON schema")
            return self._rule(self._write_schema(given["json_schema"]))
        if kind == "regex":
            return self._rule(self._terminal(self._write_regex(_text(given, "pattern", place))))
        if kind == "any_text":
            if not is_last:
                raise ValueError(
                    f"{place} is any_text, and something follows it. Only the end of a tag may"
                )
            return self._rule(self._terminal(ANY_TEXT))
        if kind == "tag":
            return self._rule(self._tag(given, place))
        if kind == "triggered_tags":
            return self._triggered(given, place, is_last=is_last)
        if kind == "tags_with_separator":
            return self._separated(given, place)
        elements = _list(given, "elements", place)
        names = [
            self._format(
                one,
                f"{place}.elements[{index}]",
                is_last=is_last and (kind == "or" or index == len(elements) - 1),
            )
            for index, one in enumerate(elements)
        ]
        return self._rule((" | " if kind == "or" else " ").join(names))

    def _tag(self, given: Any, place: str, trigger: str = "") -> str:
        """Return the right side of a tag's rule, without a trigger that has been written."""
        if not isinstance(given, dict):
            raise ValueError(f"{place} must be an object")
        begin, ends = _text(given, "begin", place), given.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError(f"{place}.end must be a text, or a list of texts")
        content = given.get("content")
        parts = [_quoted(begin[len(trigger) :])]
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            pattern = self._terminal(ANY_TEXT)
            texts = [self._rule(f"{pattern} {_quoted(end)}", "[lazy]") for end in ends]
            parts.append(f"({' | '.join(texts)})")
        else:
            is_open = ends == [""]
            parts.append(self._format(content, f"{place}.content", is_last=is_open))
            parts.append(f"({' | '.join(map(_quoted, ends))})")
        return " ".join(parts)

    def _triggered(self, given: Any, place: str, *, is_last: bool) -> str:
        """Return the rule of free text in which a trigger begins one of the tags."""
        prefix = f"{place}." if place else ""
        triggers, tags = _list(given, "triggers", place), _list(given, "tags", place)
        if not is_last:
            raise ValueError(f"{place} is triggered_tags, so nothing may follow it")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ValueError(f"{prefix}triggers must be texts")
        text = self._terminal(ANY_TEXT)
        options, complete = [], []
        for index, tag in enumerate(tags):
            begin = tag.get("begin") if isinstance(tag, dict) else None
            trigger = next((one for one in triggers if str(begin).startswith(one)), None)
            if trigger is None:
                raise ValueError(f"{prefix}tags[{index}].begin must begin with one of the triggers")
            opening = self._rule(f"{text} {_quoted(trigger)}", "[lazy]")
            options.append(f"{opening} {self._tag(tag, f'{prefix}tags[{index}]', trigger)}")
            if given.get("at_least_one"):
                complete.append(self._tag(tag, f"{prefix}tags[{index}]"))
        triggered = self._rule(" | ".join(options))
        if given.get("at_least_one"):
            first = self._rule(" | ".join(complete))
            return (
                first
                if given.get("stop_after_first")
                else self._rule(f"{first} {triggered}* {text}")
            )
        if given.get("stop_after_first"):
            return self._rule(f"{text} | {triggered}")
        return self._rule(f"{triggered}* {text}")

    def _separated(self, given: Any, place: str) -> str:
        """Return the rule of tags with a text between them."""
        tags = _list(given, "tags", place)
        names = [self._tag(tag, f"{place}.tags[{i}]") for i, tag in enumerate(tags)]
        tag = self._rule(" | ".join(names))
        separator = _quoted(_text(given, "separator", place))
        rule = tag if given.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return self._rule(rule if given.get("at_least_one") else f"({rule})?")

    def _rule(self, right: str, options: str = "") -> str:
        name = f"tag{len(self._lines)}"
        self._lines.append(f"{name}{options}: {right}")
        return name

    def _terminal(self, right: str) -> str:
        name = f"TAG{len(self._lines)}"
        self._lines.append(f"{name}: {right}")
        return name


def _modernized(given: dict[str, Any]) -> dict[str, Any]:
    """Return the older form as a format triggered_tags."""
    tags = []
    for index, one in enumerate(_list(given, "structures", "")):
        if not isinstance(one, dict):
            raise ValueError(f"structures[{index}] must be an object")
        content = {"type": "json_schema", "json_schema": one.get("schema")}
        tags.append({"begin": one.get("begin"), "content": content, "end": one.get("end")})
    return {"triggers": given.get("triggers"), "tags": tags}


def _text(given: dict[str, Any], name: str, place: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{place}.{name} must be a text")
    return value


def _list(given: dict[str, Any], name: str, place: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}.{name} must be a list".removeprefix(".") + " that is not empty")
    return value


def _quoted(text: str) -> str:
    """Return a text as Lark has it."""
    return json.dumps(text) if text else '""'
