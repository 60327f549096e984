"""Tools in /v1/responses, with the official client and a model with random weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from tests import checkpoints
from tests.api.openai.test_api_structured import SCHEMAS, TEMPLATE, WEATHER
from tests.local import LocalServer
from tests.server import Server, until

TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather",
        "parameters": WEATHER,
        "strict": True,
    },
    {"type": "function", "name": "note", "parameters": SCHEMAS["note"], "strict": False},
    {"type": "function", "name": "now", "parameters": None},
]
NAMED: Any = {"type": "function", "name": "weather"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = checkpoints.save(
        checkpoints.make_reference("llama3-gqa"),
        tmp_path_factory.mktemp("responses") / "model",
        tokenizer=False,
    )
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=4096)
    tokenizer = checkpoints.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    server = LocalServer(str(folder), "--served-model-name", "tiny", cwd=folder.parent)
    yield server
    server.await_health()
    server.stop()


@pytest.fixture(scope="module")
def ai(served: Server) -> Iterator[openai.OpenAI]:
    with served.openai() as client:
        yield client


def request(**more: Any) -> Any:
    return {
        "model": "tiny",
        "input": "Hello",
        "tools": TOOLS,
        "max_output_tokens": 600,
        "temperature": 0,
    } | more


def check_calls(items: Any) -> None:
    assert items
    for item in items:
        assert isinstance(item, ResponseFunctionToolCall)
        assert item.status == "completed"
        assert re.fullmatch("call_[0-9a-f]{24}", item.call_id)
        assert re.fullmatch(r"fc_\w+_\d+", item.id or "")
        jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_calls_are_items_with_valid_arguments(ai: openai.OpenAI, choice: Any) -> None:
    answer = ai.responses.create(**request(tool_choice=choice))
    check_calls(answer.output)
    if choice == NAMED:
        assert [item.name for item in answer.output] == ["weather"]
    assert answer.status == "completed"
    assert (
        answer.tool_choice.model_dump() == NAMED
        if choice == NAMED
        else answer.tool_choice == choice
    )
    assert [(tool.type, tool.name, tool.strict) for tool in answer.tools] == [
        ("function", "weather", True),
        ("function", "note", False),
        ("function", "now", None),
    ]
    assert len({item.id for item in answer.output}) == len(answer.output)
    Response.model_validate(answer.model_dump())


def test_only_allowed_tools_are_called(ai: openai.OpenAI) -> None:
    choice: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "now"}, {"type": "function", "name": "note"}],
    }
    items = [
        item
        for seed in ("", "So?", "Well?")
        for item in ai.responses.create(
            **request(tool_choice=choice, instructions=seed, temperature=1)
        ).output
    ]
    check_calls(items)
    assert {item.name for item in items} <= {"now", "note"}
    answer = ai.responses.create(
        **request(tool_choice=choice | {"mode": "auto"}, max_output_tokens=1)
    )
    assert answer.tool_choice.model_dump() == choice | {"mode": "auto"}


def test_one_call_without_parallel_tool_calls(ai: openai.OpenAI) -> None:
    answer = ai.responses.create(**request(tool_choice="required", parallel_tool_calls=False))
    assert len(answer.output) == 1
    assert answer.parallel_tool_calls is False


def test_stream_has_all_events_of_each_call(ai: openai.OpenAI) -> None:
    """The events follow OpenAI's documentation, and the client's stream helper accepts them."""
    body = request(tool_choice="required")
    calls = ai.responses.create(**body).output

    def stream_in_parts() -> list[Any] | None:
        """On a busy machine a call may arrive as one delta. Then the request is repeated."""
        events = list(ai.responses.create(**body, stream=True))
        deltas = [e.item_id for e in events if e.type == "response.function_call_arguments.delta"]
        return events if min(Counter(deltas).values(), default=0) > 1 else None

    events = until(stream_in_parts)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    at = 2
    for index, call in enumerate(calls):
        added = events[at]
        assert (added.type, added.output_index) == ("response.output_item.added", index)
        item = added.item
        assert (item.type, item.name, item.arguments) == ("function_call", call.name, "")
        assert item.status == "in_progress"
        at += 1
        parts = []
        while events[at].type == "response.function_call_arguments.delta":
            assert (events[at].item_id, events[at].output_index) == (item.id, index)
            parts.append(events[at].delta)
            at += 1
        assert len(parts) > 1
        assert "".join(parts) == call.arguments
        done, finished = events[at], events[at + 1]
        assert (done.type, done.item_id) == ("response.function_call_arguments.done", item.id)
        assert (done.arguments, done.name) == (call.arguments, call.name)
        assert finished.type == "response.output_item.done"
        assert (finished.item.call_id, finished.item.arguments) == (item.call_id, call.arguments)
        assert finished.item.status == "completed"
        at += 2
    [last] = events[at:]
    assert last.type == "response.completed"
    check_calls(last.response.output)
    expected = [(call.name, call.arguments) for call in calls]
    assert [(call.name, call.arguments) for call in last.response.output] == expected
    for event in events:
        type(event).model_validate(event.model_dump())
    with ai.responses.stream(**body) as stream:
        final = stream.get_final_response()
    assert [(call.name, call.arguments) for call in final.output] == expected


def test_cut_call_is_incomplete(ai: openai.OpenAI) -> None:
    complete = ai.responses.create(**request(tool_choice=NAMED))
    length = complete.usage.output_tokens
    for stream in (False, True):
        cut = ai.responses.create(
            **request(tool_choice=NAMED, max_output_tokens=length - 25, stream=stream)
        )
        answer = list(cut)[-1].response if stream else cut
        assert (answer.status, answer.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        [call] = answer.output
        assert call.status == "incomplete"
        assert complete.output[0].arguments.startswith(call.arguments)
        assert complete.output[0].arguments != call.arguments


def test_tool_choice_none_hides_the_tools(ai: openai.OpenAI) -> None:
    shown, hidden = (
        ai.responses.create(**request(tool_choice=choice, max_output_tokens=1))
        for choice in ("auto", "none")
    )
    bare = ai.responses.create(model="tiny", input="Hello", max_output_tokens=1)
    assert hidden.usage.input_tokens == bare.usage.input_tokens < shown.usage.input_tokens
    assert [item.type for item in hidden.output] == ["message"]


def test_calls_and_results_reach_the_template_as_in_a_chat(
    served: Server, ai: openai.OpenAI
) -> None:
    calls = [("call_1", '{"city": "Oslo"}'), ("call_2", '{"city": "Paris"}')]
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": "I look."},
        *(
            {
                "type": "function_call",
                "call_id": id,
                "name": "weather",
                "arguments": given,
                "status": "completed",
            }
            for id, given in calls
        ),
        {"type": "function_call_output", "call_id": "call_1", "output": "cold"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "warm"}],
        },
    ]
    messages: Any = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": id, "type": "function", "function": {"name": "weather", "arguments": given}}
                for id, given in calls
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
        {"role": "tool", "tool_call_id": "call_2", "content": "warm"},
    ]
    answer = ai.responses.with_raw_response.create(**request(input=items, max_output_tokens=12))
    assert "x-ignored-fields" not in answer.headers
    tools = [
        {
            "type": "function",
            "function": {k: v for k, v in t.items() if k != "type" and v is not None},
        }
        for t in TOOLS
    ]
    chat = served.http.post(
        "/v1/chat/completions",
        json={"messages": messages, "tools": tools, "max_tokens": 12, "temperature": 0},
    ).json()
    done = answer.parse()
    assert done.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert done.output_text == chat["choices"][0]["message"]["content"]
    alone = ai.responses.create(
        **request(input=[items[0], items[3], items[5]], max_output_tokens=1)
    )
    assert alone.usage.input_tokens < done.usage.input_tokens, "calls need no message before them"


def test_output_of_a_response_is_valid_input(ai: openai.OpenAI) -> None:
    first = ai.responses.create(**request(tool_choice="required"))
    turn: list[Any] = [{"role": "user", "content": "Hello"}]
    turn += [item.model_dump(exclude_none=True) for item in first.output]
    turn += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        for call in first.output
    ]
    again = ai.responses.create(**request(input=turn, max_output_tokens=4))
    assert again.usage.input_tokens > first.usage.input_tokens
