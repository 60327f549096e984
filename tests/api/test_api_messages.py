"""/v1/messages with Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import pydantic
import pytest

from tests.api.conftest import Reference
from tests.local import LocalServer
from tests.server import Server, until

QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}


@pytest.fixture
def messages_client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="any", max_retries=0, timeout=60.0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def expected(reference: Reference) -> str:
    return reference.text(reference.conversation(*QUESTION), 12)


def test_answer_equals_transformers(
    messages_client: anthropic.Anthropic, reference: Reference, expected: str
) -> None:
    answer = messages_client.messages.create(messages=QUESTION, **GREEDY)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == expected
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    prompt = reference.tokenizer.encode(reference.conversation(*QUESTION))
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(prompt)
    assert answer.usage.output_tokens == 12
    anthropic.types.Message.model_validate(answer.model_dump())


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_system_message_comes_first(
    messages_client: anthropic.Anthropic, reference: Reference, system: Any
) -> None:
    blocks = [{"type": "text", "text": "What is"}, {"type": "text", "text": "it?"}]
    answer = messages_client.messages.create(
        messages=[{"role": "user", "content": blocks}], system=system, **GREEDY
    )
    prompt = reference.conversation(
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\nit?"}
    )
    assert answer.content[0].text == reference.text(prompt, 12)


def test_assistant_message_at_the_end_is_continued(
    messages_client: anthropic.Anthropic, reference: Reference
) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    answer = messages_client.messages.create(messages=messages, **GREEDY)
    prompt = reference.conversation(*messages).removesuffix("<|end|><|assistant|>")
    assert answer.content[0].text == reference.text(prompt, 12)


def test_stop_sequence_is_reported(messages_client: anthropic.Anthropic, expected: str) -> None:
    stop = next(c for c in expected[2:] if c.isascii() and c not in expected[:2])
    answer = messages_client.messages.create(messages=QUESTION, stop_sequences=[stop], **GREEDY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == expected[: expected.index(stop)]


def test_stream_events_are_those_of_anthropic(
    messages_client: anthropic.Anthropic, expected: str
) -> None:
    events = list(messages_client.messages.create(messages=QUESTION, stream=True, **GREEDY))
    kinds = [event.type for event in events if event.type != "ping"]
    deltas = [event for event in events if event.type == "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event.delta.text for event in deltas) == expected
    last = next(event for event in events if event.type == "message_delta")
    assert (last.delta.stop_reason, last.usage.output_tokens) == ("max_tokens", 12)


def test_client_stream_helper_collects_the_answer(
    messages_client: anthropic.Anthropic, expected: str
) -> None:
    with messages_client.messages.stream(messages=QUESTION, **GREEDY) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().content[0].text == expected


def test_prompt_tokens_are_counted(
    messages_client: anthropic.Anthropic, reference: Reference
) -> None:
    count = messages_client.messages.count_tokens(model="tiny", messages=QUESTION).input_tokens
    assert count == len(reference.tokenizer.encode(reference.conversation(*QUESTION)))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": QUESTION}, "max_tokens"),
        ({"max_tokens": 1}, "messages"),
        ({"messages": [], "max_tokens": 1}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}], "max_tokens": 1}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}], "max_tokens": 1},
            "messages[0].content",
        ),
        ({"messages": QUESTION, "max_tokens": 0}, "max_tokens"),
        (
            {"messages": QUESTION, "max_tokens": 1, "tools": [{"name": "x"}]},
            "tools[0].input_schema",
        ),
        ({"messages": QUESTION, "max_tokens": 1, "temperature": -1}, "temperature"),
    ],
)
def test_invalid_field_is_refused_by_name(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_unknown_model_is_not_found(messages_client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="tiny"):
        messages_client.messages.create(messages=QUESTION, **GREEDY | {"model": "messages_client"})


async def test_async_client_streams(server: Server, expected: str) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="any", max_retries=0) as client,
        client.messages.stream(messages=QUESTION, **GREEDY) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == expected
    until(server.is_idle)


# ---- tools

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ call['function']['name'] }}{{ call['function']['arguments'] | tojson }}"
    "{% endfor %}{% endfor %}"
)
TOOLS = [
    {
        "name": "weather",
        "description": "The weather forecast",
        "input_schema": {
            "type": "object",
            "properties": {
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
                "dry": {"type": "boolean"},
            },
            "required": ["days", "dry"],
            "additionalProperties": False,
        },
    }
]


@pytest.fixture(scope="module")
def caller(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    """A client of a server whose template has a place for tools."""
    served = LocalServer(
        str(model), "--chat-template", TEMPLATE, "--num-gpu-blocks-override", "1024",
        cwd=tmp_path_factory.mktemp("tools"),
    )  # fmt: skip
    with anthropic.Anthropic(
        base_url=served.url, api_key="any", max_retries=0, timeout=60.0
    ) as client:
        yield client
    served.stop()


def check_call(block: anthropic.types.ToolUseBlock) -> None:
    assert (block.type, block.name) == ("tool_use", "weather")
    assert block.id
    jsonschema.validate(block.input, TOOLS[0]["input_schema"])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_required_call_has_valid_arguments(
    caller: anthropic.Anthropic, choice: dict[str, Any]
) -> None:
    options = {
        "tools": TOOLS,
        "tool_choice": choice | {"disable_parallel_tool_use": True},
        "max_tokens": 200,
    }
    answer = caller.messages.create(model="", messages=QUESTION, **options)
    assert answer.stop_reason == "tool_use"
    (block,) = (b for b in answer.content if b.type == "tool_use")
    check_call(block)

    with caller.messages.stream(model="", messages=QUESTION, **options) as stream:
        parts = [
            event.delta.partial_json for event in stream if event.type == "content_block_delta"
        ]
        final = stream.get_final_message()
    (block,) = (b for b in final.content if b.type == "tool_use")
    check_call(block)
    assert json.loads("".join(parts)) == block.input
    assert final.stop_reason == "tool_use"


def test_calls_and_results_reach_the_template(caller: anthropic.Anthropic) -> None:
    turns = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {
                    "type": "tool_use",
                    "id": "call_1",
                    "name": "weather",
                    "input": {"days": 2, "dry": True},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "Sunny"}],
                },
                {"type": "text", "text": "And then?"},
            ],
        },
    ]
    count = caller.messages.count_tokens(model="", messages=turns).input_tokens
    rendered = (
        '[user]What is a KV cache?[assistant]Let me see.weather{"days": 2, "dry": true}'
        "[tool]Sunny[user]And then?"
    )
    assert count == len(rendered)


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "schema": schema}


CONTINUED = [*QUESTION, {"role": "assistant", "content": '{"a":'}]


class Weather(pydantic.BaseModel):
    """Uses only what Anthropic's client keeps of a schema. It drops the bounds of ranges."""

    days: Literal[1, 2, 3]
    dry: bool


def test_answer_follows_the_requested_format(
    messages_client: anthropic.Anthropic,
) -> None:
    body: Any = {"model": "", "max_tokens": 200, "messages": QUESTION, "output_format": Weather}
    answer = messages_client.messages.parse(**body)
    assert isinstance(answer.parsed_output, Weather)
    with messages_client.messages.stream(**body) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Weather)


def test_format_does_not_apply_to_required_calls(caller: anthropic.Anthropic) -> None:
    answer = caller.messages.create(
        model="",
        max_tokens=200,
        messages=QUESTION,
        tools=TOOLS,
        tool_choice={"type": "any"},
        output_config={"format": json_format({"type": "object"})},
    )
    check_call(next(block for block in answer.content if block.type == "tool_use"))


def test_call_arguments_keep_large_numbers(caller: anthropic.Anthropic) -> None:
    def turns(value: Any) -> Any:
        call = {"type": "tool_use", "id": "c", "name": "weather", "input": {"days": value}}
        return [*QUESTION, {"role": "assistant", "content": [call]}, *QUESTION]

    large, small = (
        caller.messages.count_tokens(model="", messages=turns(value)).input_tokens
        for value in (2**70, 2)
    )
    assert large == small + len(str(2**70)) - 1


def test_strict_tool_is_enforced_or_refused(caller: anthropic.Anthropic) -> None:
    strict: Any = TOOLS[0] | {"strict": True}
    body: Any = {
        "model": "",
        "max_tokens": 200,
        "messages": QUESTION,
        "tool_choice": {"type": "any"},
    }
    answer = caller.messages.with_raw_response.create(tools=[strict], **body)
    assert "x-ignored-fields" not in answer.headers
    check_call(next(block for block in answer.parse().content if block.type == "tool_use"))
    strict["input_schema"] = strict["input_schema"] | {
        "properties": {"days": {"uniqueItems": True}}
    }
    with pytest.raises(anthropic.BadRequestError, match="uniqueItems"):
        caller.messages.create(tools=[strict], **body)


# ---- threads, which are not supported


def test_thread_is_refused_with_the_code_the_client_knows(
    messages_client: anthropic.Anthropic,
) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(anthropic.BadRequestError) as error:
            messages_client.messages.create(
                model="", max_tokens=4, messages=QUESTION, extra_body={"thread": thread}
            )
        body: Any = error.value.body
        assert body["error"]["details"]["error_code"] == "thread_unsupported_request"
        assert "complete conversation" in body["error"]["message"]


def test_client_tool_runner_falls_back_to_complete_conversations(
    caller: anthropic.Anthropic,
) -> None:
    sent: list[Any] = []
    caller._client.event_hooks = {
        "request": [lambda request: sent.append(json.loads(request.content))]
    }

    @anthropic.beta_tool
    def weather(days: Literal[1, 2, 3], dry: bool) -> str:
        """The weather forecast."""
        return "sunny"

    try:
        runner = caller.beta.messages.tool_runner(
            model="",
            max_tokens=200,
            messages=QUESTION,
            tools=[weather],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_iterations=2,
        )
        reasons = [message.stop_reason for message in runner]
    finally:
        caller._client.event_hooks = {"request": []}
    assert reasons == ["tool_use", "tool_use"]
    answered = [body for body in sent if "thread" not in body]
    assert [len(body["messages"]) for body in answered] == [1, 3]
    assert all(body["tools"] for body in answered)


# ---- errors


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop_sequences": [""]}, "stop_sequences"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a"}] * 9000,
                    }
                ]
                * 2
            },
            "messages",
        ),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"output_config": {"format": json_format({"type": "no"})}}, "output_config.format"),
        ({"output_config": {"format": json_format({"uniqueItems": True})}}, "output_config.format"),
        ({"output_config": {"format": json_format({})}, "messages": CONTINUED}, "output_config"),
    ],
)
def test_errors_use_the_names_of_this_interface(http: httpx.Client, body: Any, param: str) -> None:
    answer = http.post("/v1/messages", json={"messages": QUESTION, "max_tokens": 4} | body)
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param) == (param != "messages")


def error_type(error: pytest.ExceptionInfo[anthropic.APIStatusError]) -> str:
    """The error type that Anthropic's client read from the body."""
    body: Any = error.value.body
    assert (body["type"], body["request_id"]) == ("error", error.value.request_id)
    assert body["error"]["message"] in str(error.value)
    name: str = body["error"]["type"]
    assert error.value.type == name
    return name


@pytest.mark.parametrize(
    ("body", "kind", "name"),
    [
        ({"model": "none"}, anthropic.NotFoundError, "not_found_error"),
        ({"temperature": 9.0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"max_tokens": "few"}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": "x" * 9000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
    ],
)
def test_error_types_are_those_of_anthropic(
    messages_client: anthropic.Anthropic,
    body: Any,
    kind: type[anthropic.APIStatusError],
    name: str,
) -> None:
    for stream in (False, True):
        given: Any = {
            "model": "tiny",
            "max_tokens": 4,
            "messages": QUESTION,
            "stream": stream,
        } | body
        given["extra_body"] = {
            key: given.pop(key) for key in ("temperature", "max_tokens") if key in body
        }
        with pytest.raises(kind) as error:
            messages_client.messages.create(**{"max_tokens": 4} | given)
        assert error_type(error) == name


def test_errors_outside_the_routes_have_anthropic_types(
    start_local: Callable[..., Server], model: Path
) -> None:
    limits = ("--requests-per-minute", "3", "--request-timeout", "0.4")
    keys = ("--api-key", "k", "--admin-key", "boss")
    server = start_local(*limits, *keys, model=model)
    body: Any = {"model": "", "max_tokens": 8000, "messages": QUESTION}
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as error:
            stranger.messages.create(**body)
        assert error_type(error) == "authentication_error"
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as error:
            client.post("/v1/messages/batches", cast_to=object)
        assert error_type(error) == "not_found_error"
        with server.slowly():
            with pytest.raises(anthropic.APIStatusError) as error:
                client.messages.create(**body)
            assert (error.value.status_code, error_type(error)) == (504, "timeout_error")
            with (
                pytest.raises(anthropic.APIStatusError) as error,
                client.messages.stream(**body) as stream,
            ):
                assert stream.get_final_text() == "never complete"
            assert error_type(error) == "timeout_error"
            with pytest.raises(anthropic.RateLimitError) as error:
                client.messages.create(**body)
            assert error_type(error) == "rate_limit_error"
    server.http.headers["X-API-Key"] = "k"
    assert "type" not in server.http.get("/v1/models/none").json(), "other routes: OpenAI's errors"
