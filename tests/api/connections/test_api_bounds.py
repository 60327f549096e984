"""Requests that ask for too much or cannot be encoded: rejected at once, and never with a 500."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.conftest import Reference
from tests.api.test_api_errors import check_error
from tests.checkpoints import make_tokenizer
from tests.server import Server
from toolkit.api.http import server as http_server
from toolkit.api.http.body_fields import _Request
from toolkit.api.http.layers.limits import check_shape
from toolkit.api.openai import conversation
from toolkit.api.openai.answer_parts import AnswerPlan
from toolkit.api.openai.schemas import ChatRequest
from toolkit.api.openai.tools import Tool
from toolkit.config import ServerConfig
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.structured_outputs import StructuredOutputsParams
from toolkit.text.tool_formats import Llama3Format

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "x"}]
HALF = "\ud800"


def post(http: httpx.Client, path: str, body: object) -> httpx.Response:
    """Post JSON in which a lone surrogate is an escape sequence."""
    return http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def schema(value: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"chat_template_kwargs": {"allow_special_tokens": True}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"x": 10**40}}, "chat_template_kwargs"),
        (
            CHAT,
            {"response_format": schema({"maximum": 10**40, "default": 10**40})},
            "response_format",
        ),
        (RESPONSES, {"user": HALF}, "user"),
        (RESPONSES, {"metadata": {"a": HALF}}, "metadata"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": HALF}}}, "text"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_values_that_cannot_be_encoded_are_refused(
    http: httpx.Client, path: str, body: dict[str, object], param: str
) -> None:
    asked = {"input": "x"} if path == RESPONSES else {"messages": MESSAGES}
    found = check_error(post(http, path, asked | {"max_tokens": 1} | body), 400)["param"]
    assert found is not None
    assert found.split(".")[0] == param


@pytest.mark.parametrize("schema", ["[1]", "true", "[" * 100_000, "{"], ids=lambda text: text[:8])
def test_a_schema_next_to_tools_is_an_object(schema: str) -> None:
    tools = [Tool.of("f", None, None, None)]
    plan = AnswerPlan(None, Llama3Format, tools, True, False, False)
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    with pytest.raises(InvalidRequestError, match=r"not JSON|a JSON object") as caught:
        plan.constrain(asked, make_tokenizer())
    assert caught.value.param == "structured_outputs"


def test_ignored_fields_of_a_response_format_are_named(http: httpx.Client) -> None:
    format = {"type": "text", "bogus": HALF}
    answer = post(
        http, RESPONSES, {"input": "x", "max_output_tokens": 1, "text": {"format": format}}
    )
    assert answer.status_code == 200
    assert answer.headers["X-Ignored-Fields"] == "text.format.bogus"
    assert answer.json()["text"] == {"format": {"type": "text"}}


def test_a_response_format_is_returned_as_given(http: httpx.Client) -> None:
    format = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    answer = post(
        http, RESPONSES, {"input": "x", "max_output_tokens": 4, "text": {"format": format}}
    )
    assert answer.json()["text"] == {"format": format}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a"] * 60, "bad_words": ["x" * 1024] * 256}, "bad_words"),
        ({"prompt": "a", "stop": ["x" * 1024] * 64}, "stop"),
        ({"prompt": ["a"] * 8, "n": 128, "max_tokens": 20, "logprobs": 100}, "logprobs"),
        ({"prompt": ["a"] * 100, "n": 2, "max_tokens": 10**12, "logprobs": 5}, "logprobs"),
        ({"prompt": ["a" * 6000] * 2, "max_tokens": 1, "prompt_logprobs": 100}, "prompt_logprobs"),
        (
            {"prompt": "a" * 6000, "max_tokens": 1, "n": 2, "echo": True, "logprobs": 100},
            "prompt_logprobs",
        ),
        ({"prompt": [[65]] * 2048, "stop": ["x" * 1024] * 2}, "prompt"),
        ({"prompt": [None] * 600_000}, "prompt[0]"),
        ({"prompt": "a", "stop": [None] * 600_000}, "stop[0]"),
        ({"prompt": "a", "logit_bias": {str(i): None for i in range(200_000)}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(70_000)}}, "logit_bias"),
        ({"prompt": "a", "stop": ["a"] * 600_000}, "stop"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_excessive_requests_are_refused_at_once(
    server: Server, body: dict[str, object], param: str
) -> None:
    before = server.cpu_seconds()
    assert check_error(post(server.http, COMPLETIONS, body), 400)["param"] == param
    assert server.cpu_seconds() - before < 5.0


def test_repeated_allowed_tokens_count_once(server: Server, reference: Reference) -> None:
    before = server.cpu_seconds()
    body = {"prompt": [[65]] * 60, "max_tokens": 1, "allowed_token_ids": [66] * 900_000}
    answer = post(server.http, COMPLETIONS, body)
    assert {choice["text"] for choice in answer.json()["choices"]} == {
        reference.tokenizer.decode([66])
    }
    assert server.cpu_seconds() - before < 8.0


MANY = [{"role": "user", "content": ""}] * 20_000
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 20_000}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MANY}),
        (CHAT, {"messages": PARTS}),
        (RESPONSES, {"input": MANY}),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "x"}] * 20_000}
                ]
            },
        ),
        ("/v1/messages", {"max_tokens": 1, "messages": MANY}),
        ("/v1/messages", {"max_tokens": 1, "messages": PARTS}),
    ],
    ids=["messages", "parts", "items", "parts of items", "Anthropic's messages", "their parts"],
)
def test_a_conversation_with_too_many_messages_or_parts_is_refused(
    http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    found = check_error(post(http, path, body), 400)
    assert found["param"] in ("messages", "input", "messages[0].content", "input[0].content")
    assert "at most 16384" in found["message"]


def test_an_extremely_long_conversation_is_never_tokenized(http: httpx.Client) -> None:
    answer = post(http, CHAT, {"messages": [{"role": "user", "content": "x" * 2**20}]})
    assert re.search(
        "messages resulted in 104[0-9]{4} characters", check_error(answer, 400)["message"]
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(deadline=None)
@given(value=JSON, cut=st.integers(0, 40) | st.just(None), ascii=st.booleans())
def test_a_body_is_decoded_as_by_python_s_json(
    runner: asyncio.Runner, value: object, cut: int | None, ascii: bool
) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode(errors="surrogatepass")[:cut]

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    def outcome(read: Callable[[], object]) -> str:
        try:
            return repr(read())  # NaN is not equal to itself
        except ValueError as error:
            return repr(error)

    ours = outcome(lambda: runner.run(_Request({"type": "http", "headers": []}, receive).json()))
    assert ours == outcome(lambda: json.loads(body))


@pytest.mark.parametrize(
    ("more", "leaves_the_loop"),
    [
        ({}, False),
        ({"messages": MESSAGES * 300}, True),
        ({"messages": [{"role": "assistant", "reasoning_content": "x" * 30_000}]}, True),
        ({"tools": [{"function": {"name": f"f{i}"}} for i in range(100)]}, True),
    ],
    ids=["short", "messages", "reasoning", "tools"],
)
async def test_long_conversations_are_rendered_in_a_thread(
    more: dict[str, object], leaves_the_loop: bool
) -> None:
    threads = []

    def chat_prompt(*_: object, **__: object) -> list[int]:
        threads.append(threading.current_thread())
        return [1]

    engine = SimpleNamespace(inputs=SimpleNamespace(chat_prompt=chat_prompt), tokenizer=None)
    body = ChatRequest.model_validate({"messages": MESSAGES} | more).to_conversation(None)
    serving = http_server.Server(ServerConfig(), [http_server.ServedModel(engine, ("x",))])
    await conversation.encode_conversation(serving.find("x"), body, _Request({"type": "http"}))
    assert (threads != [threading.main_thread()]) == leaves_the_loop


@pytest.mark.parametrize(
    "body",
    [
        b"[a" * 2**22, b"[" * 2**22 + b"]" * 2**22, b"[" * 65 + b'""' * 2**22, b"[]" * 2**22,
        b"[" * 65 + b"]" * 65,
    ],
    ids=["open", "deep", "strings", "many", "a-little-deep"],
)  # fmt: skip
def test_the_shape_of_a_body_is_checked_quickly(body: bytes) -> None:
    start = time.thread_time()
    with pytest.raises(InvalidRequestError, match=r"nested more than|The body has more than"):
        check_shape(body)
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize(
    "value",
    [
        [[1]] * 1000,
        ["[" * 1000, '"[' * 1000, "\\" * 999 + "[", '\\"' * 1000 + "[" * 1000],
        {'{"\\': [{"x\\\\": "]"}] * 100},
    ],
    ids=["lists", "brackets-in-strings", "escapes"],
)
def test_brackets_within_strings_do_not_count_as_nesting(value: object) -> None:
    check_shape(json.dumps(value).encode())
