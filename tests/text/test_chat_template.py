"""Rendering compared with `apply_chat_template` of Transformers, and limits of the sandbox."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import pytest

from tests import checkpoints
from toolkit.errors import InvalidRequestError
from toolkit.text import template_sandbox as sandbox
from toolkit.text.chat_template import read_templates, render_template
from toolkit.text.tokenizer import Tokenizer

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set thought = message.reasoning_content
            if message.reasoning_content is defined else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last %}
            {{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string
                else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson(sort_keys=true) }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message.content is defined %}
        {%- generation %}{{- message["content"] + eos_token }}{% endgeneration %}
    {%- elif message["role"] == "tool" %}
        {%- continue %}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported,"
            ~ " with the exception of an initial system message!") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- macro text(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}
        {%- for item in content -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {% if loop.index0 > 6 %}{% break %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + text(message['content']) + '<end_of_turn>\n' }}
{% endfor %}
{%- for group in messages | groupby('role') recursive %}
    {{- group.grouper ~ group.list | length }}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

ODD = """  {% for message in messages %}
{# spaces and lines that trim_blocks and lstrip_blocks take away #}
    {% if message.content %}  {{ message.content * 2 }}  {{ 2 ** 3 + 1 }} {{ 7 % 4 }}
    {% endif %}
  {{ message | tojson }}|{{ message | tojson(indent=2, separators=(', ', ' : ')) }}|{{
  message.thinking }}
  {% endfor %}{% set x = [1] + [2] %}{{ x }} {{ x * 2 }} {{
  'a' ~ undefined_thing ~ none ~ true ~ 1.5 }}
{%- generation -%}{% set inner = 'here' %}{{ inner }}{%- endgeneration -%}
{{ inner | default('not there') }}
{%- for a in [[1, [2, [3]]]] recursive %}{% if a is iterable %}{{ loop(a) }}{%
else %}{{ a }}{% endif %}{% endfor %}
{%- for x in [] %}never{% else %}nothing{% endfor %}
{%- macro wrap() %}{{ caller(1) ~ caller('&') }}{% endmacro %}
{% call(x) wrap() %}<{{ x }}>{% endcall %} {{ documents }} {{ pad_token }} {{ my_token }}
"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA, "odd": ODD}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für einen Ort — <b>&'\"",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]
CONTENTS = [
    "Hi",
    " two  spaces ",
    "",
    "\n\nlines\n",
    "<|im_end|>{{ 1 }}",
    "日本 👩‍👩‍👧 é",
    "</s>\\n",
    "a<b>&'\"",
]


def conversation(choose: random.Random) -> list[dict]:
    """A random conversation. Some are valid for the templates, some are not."""
    messages = []
    if choose.random() < 0.4:
        messages.append({"role": "system", "content": choose.choice(CONTENTS)})
    for turn in range(choose.randint(1, 9)):
        role = (
            ("user", "assistant")[turn % 2]
            if choose.random() < 0.85
            else choose.choice(["tool", "user", "x"])
        )
        message = {"role": role, "content": choose.choice(CONTENTS), "name": None}
        if role == "assistant" and choose.random() < 0.3:
            arguments = choose.choice([{"place": "Köln", "b": 1, "a": None}, '{"place": 1}'])
            message["tool_calls"] = [
                {"type": "function", "function": {"name": "weather", "arguments": arguments}}
            ]
            message["content"] = choose.choice([None, "I look"])
        if role == "assistant" and choose.random() < 0.3:
            message[choose.choice(["reasoning_content", "reasoning", "thinking"])] = "\nhm\n"
        if role == "user" and choose.random() < 0.1:
            message["content"] = [
                {"type": "text", "text": "part"},
                {"type": "image"},
                {"type": "text", "text": " two "},
            ]
        messages.append(message)
    return messages


def options(choose: random.Random) -> dict:
    found: dict = {"add_generation_prompt": choose.random() < 0.5}
    if choose.random() < 0.3:
        found["tools"] = TOOLS
    if choose.random() < 0.2:
        found["enable_thinking"] = choose.random() < 0.5
    if choose.random() < 0.2:
        found |= {"add_generation_prompt": False, "continue_final_message": True}
    if choose.random() < 0.1:
        found |= {"documents": [{"title": "t", "text": "x"}], "bos_token": "<other>"}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("templates")
    tokenizer = checkpoints.make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.pad_token = "<|end|>"
    tokenizer.save_pretrained(folder)
    checkpoints.edit_json(folder / "tokenizer_config.json", my_token="<|user|>")
    return folder


def make(folder: Path, template: object, to: Path) -> Path:
    """Copy the tokenizer, with `template` in its tokenizer_config.json."""
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    checkpoints.edit_json(to / "tokenizer_config.json", chat_template=template)
    return to


class TestParity:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_render_equals_transformers(self, folder, tmp_path, name):
        from transformers import AutoTokenizer

        made = make(folder, TEMPLATES[name], tmp_path)
        theirs, ours = AutoTokenizer.from_pretrained(made), Tokenizer(made)
        choose = random.Random(7)
        rendered = refused = 0
        for _ in range(300):
            messages, given = conversation(choose), options(choose)
            try:
                # A template that writes the message twice leaves Transformers' marker in the text.
                expected = theirs.apply_chat_template(messages, tokenize=False, **given).replace(
                    "CONTINUE_FINAL_MESSAGE_TAG ", ""
                )
            except Exception:
                with pytest.raises(InvalidRequestError, match="refuses these messages"):
                    ours.render_chat(messages, **given)
                refused += 1
            else:
                before = json.dumps(messages)
                assert ours.render_chat(messages, **given) == expected
                assert json.dumps(messages) == before
                rendered += 1
        assert rendered > 50
        assert refused or name == "chatml"

    @pytest.mark.parametrize("field", ["content", "reasoning_content", "thinking"])
    def test_continued_field_keeps_or_loses_its_spaces(self, folder, tmp_path, field):
        from transformers import AutoTokenizer

        template = (
            "{% for m in messages %}<{{ m.reasoning_content }}|"
            "{{ m.content if keep else m.content | trim }}>{% endfor %}"
        )
        made = make(folder, template, tmp_path)
        theirs, ours = AutoTokenizer.from_pretrained(made), Tokenizer(made)
        messages = [{"role": "assistant", "content": "so far  ", "thinking": "hm  "}]
        for keep in (True, False):
            given = {"add_generation_prompt": False, "continue_final_message": field, "keep": keep}
            expected = theirs.apply_chat_template(messages, tokenize=False, **given)
            assert ours.render_chat(messages, **given) == expected
            assert expected.rstrip().endswith("so far" if field == "content" else "hm")

    def test_function_becomes_a_tool_by_its_signature(self, folder, tmp_path):
        from transformers import AutoTokenizer

        def add(a: int, b: int = 2) -> int:
            """
            Adds numbers.

            Args:
                a: The first.
                b: The second.
            """
            return a + b

        made = make(folder, CHATML, tmp_path)
        messages = [{"role": "user", "content": "1 + 2"}]
        expected = AutoTokenizer.from_pretrained(made).apply_chat_template(
            messages, tokenize=False, tools=[add], add_generation_prompt=True
        )
        assert Tokenizer(made).render_chat(messages, tools=[add]) == expected


class TestTemplateSources:
    def test_named_templates_are_chosen_by_tools_or_name(self, folder, tmp_path):
        named = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
        tokenizer = Tokenizer(make(folder, named, tmp_path))
        messages = [{"role": "user", "content": "x"}]
        assert tokenizer.render_chat(messages) == "default"
        assert tokenizer.render_chat(messages, tools=TOOLS) == "tool_use"
        assert tokenizer.render_chat(messages, chat_template="rag") == "rag"
        assert tokenizer.render_chat(messages, chat_template="{{ messages[0].content }}") == "x"

    def test_missing_default_requires_a_name(self, folder, tmp_path):
        tokenizer = Tokenizer(make(folder, [{"name": "rag", "template": "rag"}], tmp_path))
        with pytest.raises(InvalidRequestError, match="rag"):
            tokenizer.render_chat([{"role": "user", "content": "x"}])

    def test_template_files_win_over_the_config(self, folder, tmp_path):
        from transformers import AutoTokenizer

        made = make(folder, "of the config", tmp_path)
        (made / "chat_template.jinja").write_text("of the file")
        (made / "additional_chat_templates").mkdir()
        (made / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
        theirs, ours = AutoTokenizer.from_pretrained(made), Tokenizer(made)
        messages = [{"role": "user", "content": "x"}]
        for tools in (None, TOOLS):
            expected = theirs.apply_chat_template(messages, tokenize=False, tools=tools)
            assert ours.render_chat(messages, tools=tools) == expected
        assert expected == "for tools"

    def test_a_processor_s_template_wins_over_the_config(self, folder, tmp_path):
        """Models that see or hear may have it alone, or one for text next to it."""
        made = make(folder, "of the config", tmp_path)
        (made / "chat_template.json").write_text('{"chat_template": "of the processor"}')
        messages = [{"role": "user", "content": "x"}]
        assert Tokenizer(made).render_chat(messages) == "of the processor"
        (made / "chat_template.jinja").write_text("of the file")
        assert Tokenizer(made).render_chat(messages) == "of the file"

    def test_folder_without_templates_has_none(self, folder, tmp_path):
        assert read_templates(tmp_path, {}) == {}
        with pytest.raises(InvalidRequestError) as caught:
            Tokenizer(folder).render_chat([{"role": "user", "content": "x"}])
        assert caught.value.code == "no_chat_template"


def render(
    folder: Path, tmp_path: Path, template: str, *messages: object, **options: object
) -> str:
    given = list(messages) or [{"role": "user", "content": "x"}]
    return Tokenizer(make(folder, template, tmp_path)).render_chat(given, **options)


class TestRefusals:
    @pytest.mark.parametrize(
        ("template", "cause"),
        [
            ("{{ raise_exception('no such role') }}", "no such role"),
            ("{% for %}", "end of statement block"),
            ("{{ messages[9].content }}", "has no element 9"),
            ("{{ 1 / 0 }}", "division by zero"),
            ("{{ messages[0].content + 1 }}", "can only concatenate|must be str"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "not safely callable|unsafe"),
            ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
            ("{% for a in [1] %}" * 90 + "{% endfor %}" * 90, "nested too deeply"),
            ("{{ " + "(" * 900 + "1" + ")" * 900 + " }}", "nested too deeply"),
            ("{{ 1 | dictsort }}", "no attribute 'items'"),
            ("{% for i in range(10 ** 9) %}{% endfor %}", "too big"),
        ],
    )
    def test_template_error_names_the_cause(self, folder, tmp_path, template, cause):
        with pytest.raises(InvalidRequestError, match=cause) as caught:
            render(folder, tmp_path, template)
        assert caught.value.param == "messages"

    @pytest.mark.parametrize(
        ("messages", "options"),
        [
            ([], {}),
            (["text"], {}),
            ([{"role": "user", "content": "x"}], {"tools": 5}),
            ([{"role": "user", "content": "x"}], {"tools": ["x"]}),
            ([{"role": "user", "content": "x"}], {"documents": ["x"]}),
            ([{"role": "user", "content": "x"}], {"continue_final_message": True}),
            ([{"role": "user"}], {"continue_final_message": True, "add_generation_prompt": False}),
            (
                [{"role": "user", "content": 1}],
                {"continue_final_message": True, "add_generation_prompt": False},
            ),
        ],
    )
    def test_invalid_conversation_is_refused(self, folder, tmp_path, messages, options):
        tokenizer = Tokenizer(make(folder, "{{ messages[0].content }}", tmp_path))
        with pytest.raises(InvalidRequestError, match="refuses these messages"):
            tokenizer.render_chat(messages, **options)


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}%s{% endfor %}{% endfor %}"


class TestLimits:
    @pytest.mark.parametrize(
        "template",
        [
            NESTED.replace("%s", ""),
            NESTED.replace("%s", "").replace(
                "range(99999) %}{% endfor", "range(99999) if false %}{% endfor"
            ),
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
            "{{ m(60) }}",
            "{% for a in [40] recursive %}{% if a %}{{ loop([a - 1, a - 1]) }}{% endif %}"
            "{% endfor %}",
            "{% macro m() %}{{ caller() }}{% endmacro %}"
            + NESTED.replace("%s", "{% call m() %}{% endcall %}"),
        ],
        ids=["loops", "filtered-loops", "macros", "recursive-loop", "calls"],
    )
    def test_endless_template_is_stopped(self, folder, tmp_path, monkeypatch, template):
        monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.3)
        start = time.monotonic()
        with pytest.raises(InvalidRequestError, match=r"longer than 0\.3 seconds"):
            render(folder, tmp_path, template)
        assert time.monotonic() - start < 60

    def test_long_result_is_stopped(self, folder, tmp_path):
        with pytest.raises(InvalidRequestError, match=f"more than {sandbox.MAX_CHARACTERS} char"):
            render(folder, tmp_path, NESTED.replace("%s", "{{ 'text' * 10000 }}"))

    def test_long_conversation_stays_within_the_limits(self, folder, tmp_path, monkeypatch):
        # It takes well under one second, but a busy machine may be slower.
        monkeypatch.setattr(sandbox, "MAX_SECONDS", 60.0)
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(4000)
        ]
        text = render(folder, tmp_path, CHATML, *messages)
        assert len(text) > 4_000_000

    async def test_concurrent_renders_have_separate_deadlines(self, folder, tmp_path, monkeypatch):
        """Stopping one does not stop another."""
        monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.5)
        template = (
            "{% if messages[0].content == 'long' %}" + NESTED.replace("%s", "") + "{% endif %}done"
        )
        tokenizer = Tokenizer(make(folder, template, tmp_path))
        long, short = (
            asyncio.to_thread(tokenizer.render_chat, [{"role": "user", "content": content}])
            for content in ("long", "short")
        )
        first, second = await asyncio.gather(long, short, return_exceptions=True)
        assert isinstance(first, InvalidRequestError)
        assert second == "done"


PARTS = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Reads parts alone, as SmolVLM's."""


def test_texts_are_parts_for_templates_that_read_parts_alone():
    picture = [{"type": "image"}, {"type": "text", "text": "What?"}]
    asked = {"role": "user", "content": picture}
    answered = {"role": "assistant", "content": "A cat."}
    more = {"role": "user", "content": "Sure?"}
    written = "User:<image>What?<end>\nAssistant: A cat.<end>\nUser: Sure?<end>\nAssistant:"
    assert render_template(PARTS, {}, [asked, answered, more]) == written
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render_template(PARTS, {}, [more, answered], **options) == (
        "User: Sure?<end>\nAssistant: A cat."
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # reads texts
        "{{ messages[0].type }}",  # reads neither
        "{{ raise_exception('no type') if 'QUESTION' in messages[0].content else 'text' }}",
    ],
)
def test_texts_stay_texts_for_other_templates(template):
    message = {"role": "user", "content": "a type"}
    assert render_template(template, {}, [message]) in ("a type", "", "text")
