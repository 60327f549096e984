"""/v1/responses with the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests import checkpoints
from tests.api.conftest import Reference
from tests.server import WAIT, Server, until
from toolkit.api.openai.conversation import AnswerPart
from toolkit.api.openai.replies import PromptTokensDetails, Usage
from toolkit.api.openai.response_events import ResponseBuilder
from toolkit.api.openai.response_request import ResponsesRequest
from toolkit.sampling.params import SamplingParams

QUESTION = "What is a KV cache?"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def expected(reference: Reference) -> str:
    """The greedy answer to QUESTION, cut by its length."""
    prompt = reference.conversation({"role": "user", "content": QUESTION})
    assert checkpoints.EOS not in reference.tokens(prompt, 12)
    return reference.text(prompt, 12)


def test_answer_equals_transformers(
    client: openai.OpenAI, reference: Reference, expected: str
) -> None:
    answer = client.responses.create(input=QUESTION, **GREEDY)
    assert answer.output_text == expected
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.completed_at) == ("incomplete", None)
    assert answer.model == "tiny"
    prompt = reference.conversation({"role": "user", "content": QUESTION})
    assert answer.usage.input_tokens == len(reference.tokenizer.encode(prompt))
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (
        12,
        12 + answer.usage.input_tokens,
    )
    assert answer.store is True
    Response.model_validate(answer.model_dump())  # the client itself does not validate


def test_conversation_with_instructions_is_rendered_as_chat(
    client: openai.OpenAI, reference: Reference
) -> None:
    earlier = {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
    }
    turns = [
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        earlier,
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    answer = client.responses.with_raw_response.create(
        input=turns, instructions="Be brief.", **GREEDY
    )
    assert "x-ignored-fields" not in answer.headers
    prompt = reference.conversation(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": QUESTION},
    )
    assert answer.parse().output_text == reference.text(prompt, 12)


def test_stream_events_are_those_of_openai(client: openai.OpenAI, expected: str) -> None:
    events = list(client.responses.create(input=QUESTION, stream=True, **GREEDY))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in deltas) == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert {event.item_id for event in deltas} == {events[-1].response.output[0].id}
    done = events[-1].response
    assert done.output_text == expected
    assert done.usage.output_tokens == 12
    for event in events:
        type(event).model_validate(event.model_dump())


def test_client_stream_helper_collects_the_answer(client: openai.OpenAI, expected: str) -> None:
    with client.responses.stream(input=QUESTION, **GREEDY) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    assert text == expected


def test_finished_answer_is_completed(http: httpx.Client) -> None:
    """A constraint ends the answer."""
    format = {"type": "json_schema", "name": "x", "schema": {"const": "Done."}}
    body = {"input": QUESTION, "text": {"format": format}}
    done = http.post("/v1/responses", json=body).json()
    assert (done["status"], done["incomplete_details"]) == ("completed", None)
    assert 0 <= done["completed_at"] - done["created_at"] < 60
    assert done["output"][0]["content"][0]["text"] == '"Done."'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "1"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input",
        ),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True, "stream": True}, "background"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "include": ["everything"]}, "include[0]"),
        ({"input": "x", "top_logprobs": 101}, "top_logprobs"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "function", "name": "f"}] * 200}, "tools"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": "maybe"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "text.format",
        ),
        ({"input": "x" * 9000}, "input"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "\ud800"}, "input"),
    ],
)
def test_invalid_field_is_refused_by_name(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/responses", content=json.dumps(body), headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (
            "responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "text.format",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
            "max_completion_tokens",
        ),
    ],
)
def test_errors_begin_with_the_name_that_was_sent(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = http.post(f"/v1/{path}", json=body).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} ")


def test_disconnect_ends_the_request(server: Server) -> None:
    body = {"input": QUESTION, "max_output_tokens": 8000, "stream": True, "temperature": 0}
    with (
        server.slowly(),
        httpx.Client(base_url=server.url, timeout=WAIT) as http,
        http.stream("POST", "/v1/responses", json=body) as answer,
    ):
        next(answer.iter_lines())
    until(server.is_idle)


async def test_reasoning_tokens_are_counted_apart() -> None:
    class FakeAnswer(SimpleNamespace):
        async def parts(self) -> AsyncIterator[AnswerPart]:
            yield AnswerPart("reasoning", "as it ")
            yield AnswerPart("reasoning", "is")
            yield AnswerPart("text", "Oslo")

    group = SimpleNamespace(num_tokens=14, usage=lambda: Usage(3, 14, 17, PromptTokensDetails(0)))
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode()))
    answer = FakeAnswer(
        group=group, tokenizer=tokenizer, params=SamplingParams(), finish_reason="stop"
    )
    builder = ResponseBuilder(ResponsesRequest(input="Where?"), answer, "1", "tiny")
    response = await builder.collect()
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len("as it is")
