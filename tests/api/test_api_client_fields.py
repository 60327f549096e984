"""Fields that OpenAI's and Anthropic's clients can send: used, accepted or refused by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from toolkit.api.anthropic.messages import CountRequest, MessagesRequest
from toolkit.api.app import ROUTERS
from toolkit.api.http.body_fields import Body
from toolkit.api.http.client_fields import ACCEPTED
from toolkit.api.openai.response_request import ResponsesRequest
from toolkit.api.openai.schemas import ChatRequest, CompletionRequest
from toolkit.api.pooling.embeddings import EmbeddingRequest
from toolkit.api.pooling.pooling import PoolingRequest

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
}


def parts(kind: object) -> Iterator[Any]:
    """Yield the classes of bodies and typed dictionaries in an annotation."""
    if is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, Body)):
        yield kind
    for inner in get_args(kind):
        yield from parts(inner)


def literals(kind: Any) -> set[object]:
    """Return the values of a class's field `type`; empty without one."""
    return set(get_args(get_type_hints(kind).get("type")))


def unknown(sent: Any, body: type[Body], path: str, seen: set[tuple[Any, Any]]) -> Iterator[str]:
    """Yield paths of fields of a client's typed dictionary that the server does not know."""
    if (sent, body) in seen:
        return
    seen.add((sent, body))
    fields = {field.alias or name: field for name, field in body.model_fields.items()}
    for name, kind in get_type_hints(sent).items():
        if name not in fields and name not in ACCEPTED and name not in body.refused_fields:
            yield path + name
        for inner in parts(fields[name].annotation) if name in fields else ():
            for given in parts(kind):
                if literals(given) & literals(inner) or not (literals(given) and literals(inner)):
                    yield from unknown(given, inner, f"{path}{name}.", seen)


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        ("openai.types.chat.completion_create_params.CompletionCreateParamsStreaming", ChatRequest),
        (
            "openai.types.completion_create_params.CompletionCreateParamsStreaming",
            CompletionRequest,
        ),
        ("openai.types.EmbeddingCreateParams", EmbeddingRequest),
        (
            "openai.types.responses.response_create_params.ResponseCreateParamsStreaming",
            ResponsesRequest,
        ),
        ("anthropic.types.message_create_params.MessageCreateParamsStreaming", MessagesRequest),
        ("anthropic.types.MessageCountTokensParams", CountRequest),
        (
            "anthropic.types.beta.message_create_params.MessageCreateParamsStreaming",
            MessagesRequest,
        ),
        ("anthropic.types.beta.MessageCountTokensParams", CountRequest),
    ],
)
def test_every_field_of_official_clients_is_known(sent: str, body: type[Body]) -> None:
    assert list(unknown(pkgutil.resolve_name(sent), body, "", set())) == []


def test_fields_without_effect_are_accepted(http: httpx.Client) -> None:
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    fields = dict.fromkeys(ACCEPTED, "x") | {"metadata": {"a": "b"}, "store": True}
    for path, body in BODIES.items():
        if "input" not in body:
            body = body | {"messages": [{"role": "user", "content": [part]}]}
        answer = http.post(path, json=body | fields)
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers
        assert answer.json().get("store") in (None, True)


def test_fields_that_would_change_the_answer_are_refused(http: httpx.Client) -> None:
    harmless = {"audio": None, "functions": [], "modalities": ["text"], "mcp_servers": []}
    harmless |= {"background": False, "function_call": "auto"}
    for path, body in BODIES.items():
        assert http.post(path, json=body | harmless).status_code == 200
    bodies = BODIES | {"/v1/completions": {"prompt": "Hello"}, "/pooling": {"input": "Hello"}}
    kinds = (
        *(ChatRequest, ResponsesRequest, MessagesRequest, CountRequest),
        *(CompletionRequest, PoolingRequest),
    )
    for (path, body), kind in zip(bodies.items(), kinds, strict=True):
        assert kind.refused_fields
        for name, reason in kind.refused_fields.items():
            answer = http.post(path, json=body | {name: {}})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name)
            assert error["message"] == f"{name} is not supported: {reason}."


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": [*HELLO, {"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[1].function_call",
        ),
        (
            "/v1/messages",
            {"messages": [*HELLO, {"role": "system", "content": "x", "clear_at": "now"}]},
            "messages[1].clear_at",
        ),
        ("/v1/responses", {"include": ["message.output_text"]}, "include[0]"),
        ("/v1/chat/completions", {"reasoning_effort": "lots"}, "reasoning_effort"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    ],
)
def test_nested_fields_and_values_are_refused_by_name(
    http: httpx.Client, path: str, more: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=BODIES[path] | more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "kind", "supported"),
    [
        ("/v1/chat/completions", "custom", "function"),
        ("/v1/responses", "web_search", "function"),
        ("/v1/messages", "bash_20250124", "custom"),
        ("/v1/messages/count_tokens", "browser_toolset_20260801", "custom"),
    ],
)
def test_types_of_tools_are_refused_by_name(
    http: httpx.Client, path: str, kind: str, supported: str
) -> None:
    error = http.post(path, json=BODIES[path] | {"tools": [{"type": kind}]}).json()["error"]
    reason = f"Only tools of type '{supported}' are supported, not '{kind}'."
    assert (error["message"], error["param"]) == (f"tools: {reason}", "tools")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (ChatRequest(messages=HELLO, reasoning_effort="low"), {"reasoning_effort": "low"}),
        (
            ResponsesRequest(input="x", reasoning={"effort": "none", "summary": "auto"}),
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        (
            MessagesRequest(
                messages=HELLO, max_tokens=1, thinking={"type": "disabled"},
                output_config={"effort": "high"},
            ),
            {"reasoning_effort": "high", "enable_thinking": False},
        ),
        (
            MessagesRequest(
                messages=HELLO, max_tokens=1, thinking={"type": "enabled", "budget_tokens": 1024}
            ),
            {},
        ),
        (
            ChatRequest(
                messages=HELLO, reasoning_effort="none",
                chat_template_kwargs={"enable_thinking": True},
            ),
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
    ],
)  # fmt: skip
def test_reasoning_options_reach_the_chat_template(body: Any, expected: dict[str, Any]) -> None:
    options = body.to_conversation({}).options
    assert options == expected | {
        "add_generation_prompt": True,
        "continue_final_message": False,
    }


def test_only_true_and_false_are_booleans() -> None:
    """No class of bodies takes "yes" or 1, whatever its interface."""
    assert ROUTERS, "all classes are loaded"
    kinds, checked = [Body], 0
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name, field in kind.model_fields.items():
            if "bool" in str(field.annotation):
                checked += 1
                for given in ("yes", 1):
                    with pytest.raises(ValidationError):
                        assert TypeAdapter(field.rebuild_annotation()).validate_python(given), name
    assert checked >= 60
