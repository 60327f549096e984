"""Calls of earlier answers that are broken, in the conversation of the next request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from tests.local import LocalServer

TEMPLATES = {
    "text": """\
{% for m in messages %}{{ m.role }}:{{ 'none' if m.content is none else m.content }}
{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}""",
    "items": """\
{% for m in messages %}{{ m.role }}:{% for call in m.tool_calls or [] %}
{% for name, value in call.function.arguments | items %}{{ name }}={{ value }};{% endfor %}
{% endfor %}{% endfor %}""",
}
CUT = '{"city": "Os'


def prompt_of(template: str, tmp_path: Path, arguments: str) -> str:
    """Return the prompt that a server makes of a conversation with a call."""
    model = checkpoints.save(checkpoints.make_reference("llama3-gqa"), tmp_path / "model")
    (tmp_path / "template.jinja").write_text(TEMPLATES[template])
    server = LocalServer(str(model), "--chat-template", "template.jinja", cwd=tmp_path)
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    asked: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    asked.append({"role": "tool", "tool_call_id": "1", "content": "Sun"})
    items = [asked[0], {"type": "function_call", "call_id": "1", **function}]
    items.append({"type": "function_call_output", "call_id": "1", "output": "Sun"})
    try:
        body = {"messages": asked, "max_tokens": 1, "return_token_ids": True}
        answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        tokens = {"tokens": answer["prompt_token_ids"]}
        prompt = server.http.post("/detokenize", json=tokens).raise_for_status().json()["prompt"]
        body = {"input": items, "max_output_tokens": 1}
        others = [server.http.post("/v1/responses", json=body)]
        if arguments == '{"city": "Oslo"}':
            block = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
            result = {"type": "tool_result", "tool_use_id": "1", "content": "Sun"}
            messages = [asked[0], {"role": "assistant", "content": [block]}]
            messages.append({"role": "user", "content": [result]})
            body = {"model": "model", "messages": messages, "max_tokens": 1}
            others.append(server.http.post("/v1/messages", json=body))
        usages = [other.raise_for_status().json()["usage"] for other in others]
        sizes = [one["input_tokens"] + one.get("cache_read_input_tokens", 0) for one in usages]
        assert sizes == [len(answer["prompt_token_ids"])] * len(others)
    finally:
        server.stop()
    return prompt


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        ("text", CUT, json.dumps(CUT)),
        ("text", '{"city": "Oslo"}', '{"city": "Oslo"}'),
        ("text", json.dumps('{"city": "Oslo"}'), '{"city": "Oslo"}'),
        ("items", CUT, ""),
        ("items", '{"city": "Oslo"}', "city=Oslo;"),
        ("items", "null", ""),
    ],
)
def test_broken_arguments_are_rendered(tmp_path, template, arguments, expected):
    """Render text, or an empty object if the template reads arguments one by one."""
    prompt = prompt_of(template, tmp_path, arguments)
    assert expected in prompt
    assert ("assistant:none" in prompt) == (template == "text")
    assert ("=" in prompt) == ("=" in expected)
