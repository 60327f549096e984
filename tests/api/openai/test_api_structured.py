"""Constraints, tools and reasoning, with the official client and a model with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests import checkpoints
from tests.local import LocalServer
from tests.server import Server

THINK, END_OF_THINKING = 260, 261
TEMPLATE = """\
{%- if tools %}<|user|>tools:{% for tool in tools %} {{ tool | tojson }}{% endfor -%}
, called in <tool_call>.{% endif -%}
{%- for m in messages -%}
<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.role }}:{{ m.content }}
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif -%}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}
{%- if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% if think %}<think>
{% elif think is false %}<think></think>
{% endif %}{% endif -%}"""

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE: dict[str, Any] = {
    "$defs": {"tag": {"enum": ["a", "b"]}},
    "type": "object",
    "properties": {"tag": {"$ref": "#/$defs/tag"}, "text": {"type": "string", "maxLength": 5}},
    "required": ["tag", "text"],
    "additionalProperties": False,
}
SCHEMAS = {
    "weather": WEATHER,
    "note": NOTE,
    "now": {"type": "object", "additionalProperties": False},
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "note", "parameters": NOTE, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
ASK: Any = [{"role": "user", "content": "Hello"}]
NO_THOUGHTS: Any = {"chat_template_kwargs": {"think": False}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.save(
        checkpoints.make_reference("llama3-gqa"),
        tmp_path_factory.mktemp("structured") / "model",
        tokenizer=False,
    )
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=4096)
    tokenizer = checkpoints.make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Server]:
    server = LocalServer(
        str(folder), "--served-model-name", "tiny", "--reasoning-parser", "qwen3",
        "--num-gpu-blocks-override", "2048", cwd=folder.parent,
    )  # fmt: skip
    yield server
    server.await_health()
    server.stop()


@pytest.fixture(scope="module")
def ai(served: Server) -> Iterator[openai.OpenAI]:
    with served.openai() as client:
        yield client


def check_calls(calls: Any) -> None:
    for call in calls:
        assert re.fullmatch("call_[0-9a-f]{24}", call.id)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


# ---- constraints


class Trip(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["sea", "land"]
    days: Literal[1, 2, 3]
    stops: list[Literal["x", "yy"]] = pydantic.Field(min_length=1, max_length=3)


def test_pydantic_class_is_parsed(ai):
    answer = ai.chat.completions.parse(
        model="tiny",
        messages=ASK,
        response_format=Trip,
        n=3,
        seed=1,
        max_completion_tokens=400,
        extra_body=NO_THOUGHTS,
    )
    assert all(isinstance(choice.message.parsed, Trip) for choice in answer.choices)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stream_equals_the_complete_answer(ai, temperature):
    body: Any = {
        "model": "tiny",
        "messages": ASK,
        "temperature": temperature,
        "seed": 5,
        "max_tokens": 300,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "w", "schema": WEATHER, "strict": True},
        },
        "extra_body": NO_THOUGHTS,
    }
    choice = ai.chat.completions.create(**body).choices[0]
    parts = [
        c.choices[0].delta.content or "" for c in ai.chat.completions.create(**body, stream=True)
    ]
    assert "".join(parts) == choice.message.content
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), WEATHER)


def test_every_constraint_in_chat_and_completions(ai):
    constraints: list[tuple[dict[str, Any], str]] = [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"grammar": 'start: "x"+ "y"'}, "x+y"),
        ({"json": {"const": 5}}, "5"),
    ]
    for constraint, expected in constraints:
        extra = {"structured_outputs": constraint}
        chat = ai.chat.completions.create(
            model="tiny", messages=ASK, n=2, extra_body=extra | NO_THOUGHTS
        )
        plain = ai.completions.create(
            model="tiny", prompt=["a", "b"], extra_body=extra, max_tokens=50
        )
        for text in [c.message.content for c in chat.choices] + [c.text for c in plain.choices]:
            assert re.fullmatch(expected, text), constraint


def test_json_object_is_valid_json(ai):
    bias = {str(ord("}") - 33): 30}
    answer = ai.chat.completions.create(
        model="tiny",
        messages=ASK,
        response_format={"type": "json_object"},
        logit_bias=bias,
        extra_body=NO_THOUGHTS,
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_schema_may_stand_next_to_the_type(ai, kind):
    answer = ai.chat.completions.create(
        model="tiny",
        messages=ASK,
        extra_body={"response_format": {"type": kind, "schema": {"const": {"a": 7}}}} | NO_THOUGHTS,
    )
    assert json.loads(answer.choices[0].message.content or "") == {"a": 7}


# ---- tools


def create(ai: openai.OpenAI, **body: Any) -> Any:
    given = {
        "model": "tiny",
        "messages": ASK,
        "tools": TOOLS,
        "max_tokens": 600,
        "extra_body": NO_THOUGHTS,
    } | body
    return ai.chat.completions.create(**given)


def test_required_calls_have_valid_arguments(ai):
    choices = [
        choice
        for seed in range(3)
        for choice in create(ai, tool_choice="required", n=3, seed=10 * seed, temperature=2).choices
    ]
    for choice in choices:
        check_calls(choice.message.tool_calls)
        assert choice.message.tool_calls
        assert choice.message.content is None
        assert choice.finish_reason == "tool_calls"
    assert len({call.function.name for choice in choices for call in choice.message.tool_calls}) > 1


def test_named_tool_is_called_once(ai):
    [choice] = create(ai, tool_choice={"type": "function", "function": {"name": "note"}}).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["note"]
    check_calls(choice.message.tool_calls)
    assert choice.finish_reason == "stop"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(("letter", "name"), [("t", "note"), ("w", "now")])
def test_only_allowed_tools_are_called(ai, letter, name):
    """The letter is the likeliest. With "w" the model would call the weather if it might."""
    choices = create(
        ai,
        tool_choice=allowed("required", "now", "note"),
        n=2,
        seed=1,
        logit_bias={str(ord(letter) - 33): 100},
    ).choices
    calls = [call for choice in choices for call in choice.message.tool_calls]
    check_calls(calls)
    assert {call.function.name for call in calls} == {name}
    assert {choice.finish_reason for choice in choices} == {"tool_calls"}


@pytest.mark.parametrize("first", ["<", "N"])
def test_allowed_tools_need_not_be_called(ai, first):
    extra: Any = NO_THOUGHTS | {"structured_outputs": {"choice": ["Nothing to do."]}}
    bias = {str(ord(first) - 33): 100}
    choice = allowed("auto", "now")  # a function without arguments
    [answer] = create(ai, tool_choice=choice, logit_bias=bias, extra_body=extra).choices
    names = [call.function.name for call in answer.message.tool_calls or []]
    if first == "N":
        assert (answer.message.content, names) == ("Nothing to do.", [])
    else:
        assert answer.message.content is None
        assert set(names) == {"now"}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_stop_does_not_cut_required_calls(ai, choice):
    """Every call of weather contains these texts in its arguments."""
    body: Any = {"tool_choice": choice, "tools": TOOLS[:1], "seed": 1, "stop": ["days", ": "]}
    body["extra_body"] = NO_THOUGHTS | {"stop_token_ids": [ord('"') - 33]}
    complete = create(ai, **body).choices[0]
    check_calls(complete.message.tool_calls)
    assert complete.finish_reason == ("tool_calls" if choice == "required" else "stop")
    chunks = [c.choices[0] for c in create(ai, **body, stream=True)]
    parts = [
        c.function.arguments for one in chunks for c in one.delta.tool_calls or [] if c.index == 0
    ]
    assert "".join(parts) == complete.message.tool_calls[0].function.arguments
    assert chunks[-1].finish_reason == complete.finish_reason


def test_stop_string_in_an_optional_call_is_no_tool_call(ai):
    """A stream has sent the beginning of the call, so finish_reason says that it is incomplete."""
    text = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
    )
    body: Any = {"extra_body": NO_THOUGHTS | {"structured_outputs": {"choice": [text]}}}
    for stop, arguments, reason in [
        ("days", '{"city": "Oslo", "', "stop"),
        ("\n</tool", '{"city": "Oslo", "days": 2}', "tool_calls"),
    ]:
        complete = create(ai, **body, stop=stop).choices[0]
        chunks = [c.choices[0] for c in create(ai, **body, stop=stop, stream=True)]
        streamed = [c.function.arguments for one in chunks for c in one.delta.tool_calls or []]
        assert complete.message.tool_calls[0].function.arguments == "".join(streamed) == arguments
        assert complete.finish_reason == chunks[-1].finish_reason == reason


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("where", ["response_format", "tools", "answer next to tools"])
def test_strict_schema_forbids_unnamed_properties(ai, where, strict):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    named = {"name": "x", "strict": strict}
    tool = {"type": "function", "function": named | {"parameters": schema}}
    format = {"type": "json_schema", "json_schema": named | {"schema": schema}}
    body: Any = {
        "response_format": {"response_format": format, "tools": openai.omit},
        "tools": {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        "answer next to tools": {"tools": [tool], "response_format": format},
    }[where]
    bias = {str(ord(",") - 33): 100, str(ord("{") - 33): 50}
    message = create(ai, **body, max_tokens=150, logit_bias=bias).choices[0].message
    text = message.content or message.tool_calls[0].function.arguments
    assert ("," in text) != strict
    assert text.startswith("{")


FLAT_TOOL: dict[str, Any] = {"name": "weather", "parameters": WEATHER}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "chat/completions",
            {"tools": TOOLS, "tool_choice": "required", "max_tokens": 20} | NO_THOUGHTS,
        ),
        (
            "responses",
            {
                "input": "Hello",
                "tools": [FLAT_TOOL | {"type": "function"}],
                "tool_choice": "required",
                "max_output_tokens": 20,
            },
        ),
        (
            "messages",
            {
                "tools": [{"name": "weather", "input_schema": WEATHER}],
                "tool_choice": {"type": "any"},
                "max_tokens": 20,
            },
        ),
    ],
)
def test_required_call_cut_before_its_name_leaves_no_text(served, path, body):
    body = {"temperature": 0.0} | body | ({} if path == "responses" else {"messages": ASK})
    answer = served.http.post(f"/v1/{path}", json=body)
    streamed = served.http.post(f"/v1/{path}", json=body | {"stream": True}).text
    assert answer.status_code == 200, answer.text
    for text in (answer.text, streamed):
        assert "tool_call>" not in text
        assert "length" in text or "max_output_tokens" in text or "max_tokens" in text


def test_one_call_without_parallel_tool_calls(ai):
    answer = create(ai, tool_choice="required", parallel_tool_calls=False, n=4, seed=3)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1] * 4


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_streamed_calls_equal_the_complete_answer(ai, choice):
    body: Any = {"tool_choice": choice, "seed": 4, "temperature": 1.0}
    complete = create(ai, **body).choices[0]
    given = {
        "model": "tiny",
        "messages": ASK,
        "tools": TOOLS,
        "max_tokens": 600,
        "extra_body": NO_THOUGHTS,
    }
    # The client joins the deltas.
    with ai.chat.completions.stream(**given, **body) as stream:
        final = stream.get_final_completion().choices[0]
    expected, found = (
        [(c.function.name, c.function.arguments) for c in one.message.tool_calls]
        for one in (complete, final)
    )
    assert found == expected
    assert complete.finish_reason == final.finish_reason

    chunks = [c.choices[0].delta for c in create(ai, **body, stream=True)]
    deltas = [call for delta in chunks for call in delta.tool_calls or []]
    firsts = [delta for delta in deltas if delta.id is not None]
    assert [delta.index for delta in firsts] == list(range(len(complete.message.tool_calls)))
    assert all(delta.type == "function" and delta.function.name for delta in firsts)
    assert all(delta.function.name is None for delta in deltas if delta.id is None)
    joined = [
        "".join(d.function.arguments or "" for d in deltas if d.index == i)
        for i in range(len(firsts))
    ]
    assert joined == [call.function.arguments for call in complete.message.tool_calls]
    assert not any(delta.content for delta in chunks)


@pytest.mark.parametrize("first", ["<", '"'])
def test_auto_gives_a_call_or_a_constrained_answer(ai, first):
    schema = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"enum": ["plain"]}}}
    asked = {"response_format": schema, "parallel_tool_calls": False, "n": 2, "seed": 2}
    bias = {str(ord(first) - 33): 100}
    for choice in create(ai, tool_choice="auto", logit_bias=bias, **asked).choices:
        if first == "<":
            assert choice.message.content is None
            check_calls(choice.message.tool_calls)
            assert choice.finish_reason == "tool_calls"
        else:
            assert choice.message.tool_calls is None
            assert choice.message.content == '"plain"'


def test_content_before_a_call_is_parsed(ai):
    call = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
    text = f"I look.\n<tool_call>\n{call}\n</tool_call>"
    extra = NO_THOUGHTS | {"structured_outputs": {"choice": [text]}}
    complete = create(ai, extra_body=extra, logit_bias={str(ord("<") - 33): -100}).choices[0]
    deltas = [c.choices[0].delta for c in create(ai, extra_body=extra, stream=True, n=1, seed=1)]
    assert complete.message.content in (None, "I look.")
    assert complete.finish_reason == "tool_calls"
    check_calls(complete.message.tool_calls)
    assert any(delta.tool_calls for delta in deltas)
    # Without tools, or with tool_choice none, the same text is content.
    for body in ({"tools": openai.omit}, {"tool_choice": "none"}):
        plain = create(ai, extra_body=extra, **body).choices[0]
        assert (plain.message.content, plain.message.tool_calls) == (text, None)
        assert plain.finish_reason == "stop"


def test_calls_and_results_render_as_in_transformers(ai, folder):
    import transformers

    messages: Any = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Oslo it is",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "cold"}]},
    ]
    answer = create(ai, messages=messages, max_tokens=1, extra_body={"return_token_ids": True})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Oslo"}
    messages[2]["content"] = "cold"
    expected = tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(answer.model_extra["prompt_token_ids"]) == expected


# ---- reasoning


def reasoned(**options: Any) -> Any:
    bias = {str(END_OF_THINKING): 6, str(checkpoints.EOS): 3}
    return {"model": "tiny", "messages": ASK, "max_tokens": 600, "logit_bias": bias} | options


@pytest.mark.parametrize("template", [{"chat_template_kwargs": {"think": True}}, {}])
def test_reasoning_is_split_and_the_constraint_follows(ai, template):
    bias = {str(END_OF_THINKING): 30, str(THINK): 30} if not template else {str(END_OF_THINKING): 5}
    body = reasoned(
        response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    )
    body |= {"extra_body": template, "seed": 9, "logit_bias": bias}
    message = ai.chat.completions.create(**body).choices[0].message
    deltas = [c.choices[0].delta for c in ai.chat.completions.create(**body, stream=True)]
    jsonschema.validate(json.loads(message.content), WEATHER)
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == (getattr(message, "reasoning_content", None) or "")
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "think>" not in message.content


def test_tools_are_called_after_the_reasoning(ai):
    body = reasoned(
        tools=TOOLS,
        tool_choice="required",
        extra_body={"chat_template_kwargs": {"think": True}},
        n=3,
    )
    for choice in ai.chat.completions.create(**body).choices:
        check_calls(choice.message.tool_calls)
        assert choice.message.content is None


def test_answer_without_reasoning_is_content(ai):
    answer = ai.completions.create(
        model="tiny", prompt="<think>a</think>b", echo=True, max_tokens=1
    )
    assert answer.choices[0].text.startswith("<think>a</think>b")
    chat = ai.chat.completions.create(
        model="tiny",
        messages=ASK,
        extra_body=NO_THOUGHTS | {"structured_outputs": {"choice": ["b</think>c"]}},
    )
    assert chat.choices[0].message.content == "b</think>c"


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_answer_follows_a_structural_tag(served: Server, field: str) -> None:
    elements = [
        {"type": "const_string", "value": "<answer>"},
        {"type": "json_schema", "json_schema": {"const": 42}},
    ]
    tag: Any = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    asked = {field: {"structural_tag": tag} if field == "structured_outputs" else tag}
    body = {"messages": ASK, "max_tokens": 40} | asked | NO_THOUGHTS
    answer = served.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "<answer>42"


# ---- errors


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, None, "json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "json_object"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "no"}},
                }
            },
            "response_format",
            "Invalid type: no",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "strict": True,
                        "schema": {"type": "array", "uniqueItems": True},
                    },
                }
            },
            "response_format",
            "uniqueItems",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structures must"),
        ({"response_format": {"type": "text", "triggers": ["a"]}}, "response_format", "triggers"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "regex, choice",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "exclude",
        ),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "weather, note, now",
        ),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type", "'function'"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice", "no tool"),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", "now", "other")},
            "tool_choice",
            "'other'",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("maybe", "now")},
            "tool_choice.allowed_tools.mode",
            "'auto' or 'required'",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools",
            "missing",
        ),
        ({"tools": []}, "tools", "empty array"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two functions named 'weather'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, None, "that matches"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "tool_choice",
            "call",
        ),
        (
            {"tools": TOOLS, "structured_outputs": {"grammar": 'start: "a"'}},
            "structured_outputs",
            "Use json, json_object, regex or choice.",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "Invalid type: no",
        ),
    ],
)
def test_invalid_request_is_a_400_with_the_reason(served, body, param, words):
    answer = served.http.post("/v1/chat/completions", json={"messages": ASK} | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param


HARD = "(((a|b){1,50}c?){1,50}a?){1,50}"
"""Within the limits when compiled, beyond them during generation."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5, 6]}, "relax one"),
        ({"structured_outputs": {"regex": HARD}, "min_tokens": 900}, "too complex"),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_unfollowable_constraint_is_a_client_error(served, path, options, words):
    """Other requests of the batch are not concerned."""
    body = {"prompt": "x", "messages": ASK, "max_tokens": 900} | options
    body.pop("messages" if path == "completions" else "prompt")
    good: Any = {"messages": ASK, "structured_outputs": {"regex": "[ab]{80}"}} | NO_THOUGHTS
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(served.http.post, "/v1/chat/completions", json=good)
        answer = served.http.post(f"/v1/{path}", json=body)
        streamed = served.http.post(f"/v1/{path}", json=body | {"stream": True})
        assert len(other.result().json()["choices"][0]["message"]["content"]) == 80
    event = json.loads(streamed.text.split("data: ")[-2])
    assert (answer.status_code, streamed.status_code) == (400, 200)
    for error in (answer.json()["error"], event["error"]):
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]
