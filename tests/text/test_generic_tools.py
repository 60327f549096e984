"""Conversations with tools, written out for templates that have no place for them."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.text.chat_template import has_system
from toolkit.text.generic_tools import write_out

FUNCTION = {"name": "f", "arguments": {"x": 1}}
CALL = '{"name": "f", "arguments": {"x": 1}}'
PICTURE = {"type": "image"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def calling(content: str | None, *ids: str) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": FUNCTION} for id in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


@pytest.mark.parametrize("has_system", [False, True])
def test_roles_alternate_and_nothing_is_lost(has_system: bool) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        user("Go."),
        calling("I look.", "1", "2"),
        result("1", "one"),
        result("2", [{"type": "text", "text": "two"}, PICTURE]),
        user("And?"),
    ]
    written = write_out(messages, "TOOLS", has_system=has_system)
    system = "Be kind.\n\nTOOLS"
    head = [{"role": "system", "content": system}, user("Go.")]
    assert written[:-2] == (head if has_system else [user(f"{system}\n\nGo.")])
    assert written[-2] == {"role": "assistant", "content": f"I look.\n{CALL}\n{CALL}"}
    assert written[-1]["role"] == "user"
    texts = [part.get("text", PICTURE) for part in written[-1]["content"]]
    assert texts == [
        "Result of f:\none", "\n\n", "Result of f:", "\n", "two", PICTURE, "\n\n", "And?",
    ]  # fmt: skip


def test_arguments_that_were_cut_stay_as_they_are() -> None:
    message = calling(None, "1")
    message["tool_calls"][0]["function"] = {"name": "f", "arguments": '{"x": '}
    [written] = write_out([message], "", has_system=True)
    assert written["content"] == '{"name": "f", "arguments": {"x": }'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content[0].type }}{{ m.content[0].text }}{% endfor %}", True),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", False),
        ("{{ raise_exception('System role not supported') }}", False),
    ],
)
def test_has_system_tries_the_template(template: str, expected: bool) -> None:
    assert has_system(template) is expected
